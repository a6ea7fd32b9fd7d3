"""Anthropic's Messages API without HTTP, with one file per step.

``blocks`` declares messages and their content, and ``bodies`` the fields and the rules to read them. ``translate``
creates the call. ``respond`` writes a message or an error, and ``stream`` writes events. ``openapi`` describes the
routes.
"""

from inlay.api.anthropic.bodies import ROUTES, Endpoint, components, read_body, translate
from inlay.api.anthropic.respond import MessageEvents, error_body, limit_headers, respond
from inlay.api.call import AnswerRoute

__all__ = ["Anthropic", "Endpoint", "Events", "error_body", "read_body", "respond", "translate"]


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
