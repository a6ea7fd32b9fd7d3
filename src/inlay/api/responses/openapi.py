"""Describes the route for new responses for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inlay.api.call import AnswerRoute
from inlay.api.describing import COUNT, TEXT, described, of_object
from inlay.api.openai.foreign import IGNORED
from inlay.api.responses.bodies import NO_EFFECT, Endpoint, ResponsesBody
from inlay.api.responses.items import FORMS

PREFIX = "Responses"
ANSWER = of_object(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    model=TEXT,
    status=TEXT,
    output={"type": "array"},
    usage=of_object(input_tokens=COUNT, output_tokens=COUNT),
    inlay=of_object(exact_tokens=COUNT),
)

ROUTES = (
    AnswerRoute(
        Endpoint.RESPONSES,
        "responses",
        "The answer to a text or to items of a conversation, in the form of OpenAI's Responses API.",
        body=f"{PREFIX}ResponsesBody",
        error="Error",
        answer=ANSWER,
    ),
)


def components(names: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of the body and its parts.

    Args:
        names: of the served model.
    """
    made = described([ResponsesBody], names, no_effect=NO_EFFECT, ignored=IGNORED, prefix=PREFIX, others=FORMS.values())
    items = [{"$ref": f"#/components/schemas/{PREFIX}{form.__name__}"} for form in FORMS.values()]
    fields = made[f"{PREFIX}ResponsesBody"]["properties"]
    for choice in fields["input"]["anyOf"]:
        if choice.get("type") == "array":
            choice["items"] = {"anyOf": items}
    return made
