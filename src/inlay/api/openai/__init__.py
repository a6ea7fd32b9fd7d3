"""OpenAI's protocol without HTTP, one file a step.

bodies, messages: which fields there are. read: JSON → body, or sentences. tools, reasoning: what a body asks of these.
translate: body → call. respond: outputs → body of a response, failure → error object. stream: outputs so far → events.
logprobs: how both write these. openapi: what the OpenAPI document says of it all.
"""

from inlay.api.call import AnswerRoute
from inlay.api.openai.bodies import Endpoint
from inlay.api.openai.openapi import ROUTES, components
from inlay.api.openai.read import read_body
from inlay.api.openai.respond import error_body, respond
from inlay.api.openai.stream import Chunks
from inlay.api.openai.translate import translate

__all__ = ["Chunks", "Endpoint", "OpenAI", "error_body", "read_body", "respond", "translate"]


class OpenAI:
    """The dialect: see ``inlay.api.dialect.Dialect``."""

    routes: tuple[AnswerRoute, ...] = ROUTES
    components = staticmethod(components)
    read = staticmethod(read_body)
    translate = staticmethod(translate)
    respond = staticmethod(respond)
    stream = Chunks
    error_body = staticmethod(error_body)
