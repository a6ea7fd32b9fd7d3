"""OpenAI's protocol without HTTP: bodies of requests read and translated, outputs and errors as bodies of responses.

One file a step: bodies (which fields there are), read (JSON → body, or sentences), translate (body → what a model
takes), respond (RequestOutput → body), logprobs, failures (errors → body).
"""

from inlay.openai.bodies import Endpoint
from inlay.openai.failures import BodyError, Failure, failure_of
from inlay.openai.read import read_body
from inlay.openai.respond import respond
from inlay.openai.translate import Call, translate

__all__ = ["BodyError", "Call", "Endpoint", "Failure", "failure_of", "read_body", "respond", "translate"]
