"""Interprets the reasoning fields of a chat's body, for the template and for the parser of the answer."""

from __future__ import annotations

from typing import Any

from inlay.api.failures import BodyError
from inlay.api.openai.bodies import ChatBody
from inlay.api.openai.messages import Message
from inlay.api.reasoning import ModelReasoning, ReasoningUse
from inlay.api.reasoning.formats import effort_variables, supported_efforts


def reasoning_of(body: ChatBody, model: ModelReasoning | None) -> ReasoningUse | None:
    """Return the form of reasoning in the answers to a body; None for a model without reasoning."""
    if model is None or model.format is None:
        return None
    last = _text(body.messages[-1]) if body.continue_final_message and body.messages else None
    return ReasoningUse(model, body.include_reasoning is not False, last)


def variables_of(body: ChatBody, model: ModelReasoning | None) -> dict[str, Any]:
    """Return the template variables for ``reasoning_effort``. Raises BodyError if the template does not support it."""
    found = effort_variables(body.reasoning_effort, model)
    if found is not None:
        return found
    allowed = " or ".join(f'"{effort}"' for effort in supported_efforts(model))
    effort = body.reasoning_effort
    message = f"reasoning_effort is {effort!r}, but this model's chat template does not support it; write {allowed}"
    raise BodyError(f"{message}, or leave it out", param="reasoning_effort")


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "".join(getattr(part, "text", "") for part in message.content)
    return message.content or ""
