"""OpenAI's API without HTTP.

``bodies`` and ``messages`` declare the fields. ``bodies`` has their rules and the translation into a call, too.
``respond`` writes a response, its events, or an error.
"""

from inlay.api.call import AnswerRoute
from inlay.api.openai.bodies import ROUTES, Endpoint, components, read_body, translate
from inlay.api.openai.respond import Chunks, error_body, limit_headers, respond

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
