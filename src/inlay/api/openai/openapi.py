"""Describes OpenAI's routes for the OpenAPI document. They read bodies themselves, so FastAPI cannot describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from inlay.api.call import AnswerRoute
from inlay.api.openai.bodies import NO_EFFECT, ChatBody, CompletionBody, Endpoint
from inlay.api.openai.foreign import IGNORED
from inlay.policy import KEY, POSITIONS, WORDS

_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of an object that requires these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param={}, code={}))
_ANSWER = _object(
    object=_TEXT,
    id=_TEXT,
    created=_COUNT,
    model=_TEXT,
    choices={"type": "array", "minItems": 1},
    usage=_object(prompt_tokens=_COUNT),
    inlay=_object(exact_tokens=_COUNT),
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

    The bodies include the fields without effect and the served model's names.

    Args:
        names: of the served model.
    """
    _, made = models_json_schema([(ChatBody, "validation"), (CompletionBody, "validation")], ref_template=_REF)
    words = {"model": names, "reuse": WORDS, "positions": POSITIONS}
    schemas: dict[str, Any] = made["$defs"]
    for name in ("ChatBody", "CompletionBody"):
        fields = schemas[name]["properties"]
        fields.update({field: {"description": "Accepted, and without effect."} for field in NO_EFFECT})
        fields.update({field: {"description": f"Of {known}; ignored."} for field, known in IGNORED.items()})
        for field, allowed in words.items():
            fields[field]["anyOf"] = [{"enum": list(allowed)}, {"type": "null"}]
        fields["reuse"]["anyOf"].append({"type": "string", "pattern": KEY})
    return {**schemas, "Error": _ERROR}
