"""OpenAI's API without HTTP.

``bodies`` and ``messages`` declare the fields. ``translate`` checks a body and creates the call. ``respond`` writes a
response, its events, or an error.
"""

from inlay.api.call import AnswerRoute
from inlay.api.openai.bodies import ROUTES, Endpoint, components
from inlay.api.openai.respond import Chunks, error_body, limit_headers, respond
from inlay.api.openai.translate import read_body, translate

__all__ = ["Chunks", "Endpoint", "OpenAI", "error_body", "read_body", "respond", "translate"]


class OpenAI:
    """OpenAI's dialect: see ``inlay.api.dialect.Dialect``."""

    routes: tuple[AnswerRoute, ...] = ROUTES
    components = staticmethod(components)
    read = staticmethod(read_body)
    translate = staticmethod(translate)
    respond = staticmethod(respond)
    stream = Chunks
    error_body = staticmethod(error_body)
    limit_headers = staticmethod(limit_headers)
