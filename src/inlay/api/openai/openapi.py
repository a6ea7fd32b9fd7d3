"""Describes OpenAI's routes for chats and completions for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inlay.api.call import AnswerRoute
from inlay.api.describing import COUNT, TEXT, described, of_object
from inlay.api.openai.bodies import NO_EFFECT, ChatBody, CompletionBody, Endpoint
from inlay.api.openai.foreign import IGNORED

ERROR = of_object(error=of_object(message=TEXT, type=TEXT, param={}, code={}))
_ANSWER = of_object(
    object=TEXT,
    id=TEXT,
    created=COUNT,
    model=TEXT,
    choices={"type": "array", "minItems": 1},
    usage=of_object(prompt_tokens=COUNT),
    inlay=of_object(exact_tokens=COUNT),
)

ROUTES = (
    AnswerRoute(
        Endpoint.CHAT,
        "chat_completions",
        "The next turn of a conversation, or the answer to a prompt of a schema.",
        body="ChatBody",
        error="Error",
        answer=_ANSWER,
    ),
    AnswerRoute(
        Endpoint.COMPLETIONS,
        "text_completions",
        "What comes behind a text.",
        body="CompletionBody",
        error="Error",
        answer=_ANSWER,
    ),
)


def components(names: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of both bodies, their parts, and errors.

    Args:
        names: of the served model.
    """
    return {**described([ChatBody, CompletionBody], names, no_effect=NO_EFFECT, ignored=IGNORED), "Error": ERROR}
