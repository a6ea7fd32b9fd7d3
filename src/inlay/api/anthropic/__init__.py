"""Anthropic's Messages API without HTTP.

``blocks`` declares messages and their content. ``bodies`` has the fields, the rules to read them, and the translation
into a call. ``respond`` writes a message, its events, or an error.
"""

from inlay.api.anthropic.bodies import ROUTES, Endpoint, components, read_body, translate
from inlay.api.anthropic.respond import MessageEvents, error_body, limit_headers, respond
from inlay.api.call import AnswerRoute

__all__ = ["Anthropic", "Endpoint", "MessageEvents", "error_body", "read_body", "respond", "translate"]


class Anthropic:
    """Anthropic's dialect: see ``inlay.api.dialect.Dialect``."""

    routes: tuple[AnswerRoute, ...] = ROUTES
    components = staticmethod(components)
    read = staticmethod(read_body)
    translate = staticmethod(translate)
    respond = staticmethod(respond)
    stream = MessageEvents
    error_body = staticmethod(error_body)
    limit_headers = staticmethod(limit_headers)
