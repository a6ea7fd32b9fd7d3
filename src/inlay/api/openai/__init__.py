"""OpenAI's protocol without HTTP: bodies of requests read and translated, outputs and errors as bodies of responses.

One file a step: bodies (which fields there are), read (JSON → body, or sentences), messages and tools_request (what of
it goes through the chat template), translate (body → what a model takes), respond (RequestOutput → body), logprobs,
failures (errors → body). Calls of tools: tools_formats (one row a family), tools_schema (what holds an answer to a
call), tools_free and tools_held (calls told from text), tools (their form in responses).
"""

from inlay.api.failures import BodyError, Failure, failure_of
from inlay.api.openai.bodies import Endpoint
from inlay.api.openai.read import read_body
from inlay.api.openai.respond import respond, system_fingerprint
from inlay.api.openai.translate import Call, translate
from inlay.api.tools.formats import ModelTools, model_tools

__all__ = [
    "BodyError",
    "Call",
    "Endpoint",
    "Failure",
    "ModelTools",
    "failure_of",
    "model_tools",
    "read_body",
    "respond",
    "system_fingerprint",
    "translate",
]
