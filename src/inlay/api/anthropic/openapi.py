"""Describes the routes of the Messages API for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inlay.api.anthropic.bodies import NO_EFFECT, CountBody, Endpoint, MessagesBody
from inlay.api.call import AnswerRoute
from inlay.api.describing import COUNT, TEXT, described, of_object
from inlay.api.openai.foreign import IGNORED

_PREFIX = "Anthropic"
_ERROR = of_object(type={"const": "error"}, error=of_object(type=TEXT, message=TEXT))
_ANSWER = of_object(
    id=TEXT,
    type={"const": "message"},
    role=TEXT,
    model=TEXT,
    content={"type": "array"},
    usage=of_object(input_tokens=COUNT, output_tokens=COUNT),
    inlay=of_object(exact_tokens=COUNT),
)

ROUTES = (
    AnswerRoute(
        Endpoint.MESSAGES,
        "messages",
        "The next turn of a conversation, in the form of Anthropic's Messages API.",
        body=f"{_PREFIX}MessagesBody",
        error=f"{_PREFIX}Error",
        answer=_ANSWER,
    ),
)


def components(names: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of both bodies, their parts, and errors.

    Args:
        names: of the served model.
    """
    bodies = [MessagesBody, CountBody]
    made = described(bodies, names, no_effect=NO_EFFECT, ignored=IGNORED, prefix=_PREFIX)
    return {**made, f"{_PREFIX}Error": _ERROR}
