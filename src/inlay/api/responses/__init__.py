"""OpenAI's Responses API without HTTP.

``items`` declares the input. ``bodies`` has the fields, the rules to read them, and the translation into a call.
``respond`` writes a response and its events. The server stores responses.
"""

from inlay.api.call import AnswerRoute
from inlay.api.openai.respond import error_body, limit_headers
from inlay.api.responses.bodies import ROUTES, Endpoint, components, read_body, translate
from inlay.api.responses.respond import ResponseEvents, respond

__all__ = ["Endpoint", "ResponseEvents", "Responses", "read_body", "respond", "translate"]


class Responses:
    """The dialect of OpenAI's Responses API: see ``inlay.api.dialect.Dialect``."""

    routes: tuple[AnswerRoute, ...] = ROUTES
    components = staticmethod(components)
    read = staticmethod(read_body)
    translate = staticmethod(translate)
    respond = staticmethod(respond)
    stream = ResponseEvents
    error_body = staticmethod(error_body)
    limit_headers = staticmethod(limit_headers)
