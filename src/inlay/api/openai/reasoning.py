"""Interprets the reasoning fields of a chat's body, for the template and for the parser of the answer."""

from __future__ import annotations

from inlay.api.openai.bodies import ChatBody
from inlay.api.openai.messages import Message
from inlay.api.reasoning import ModelReasoning, ReasoningUse


def reasoning_of(body: ChatBody, model: ModelReasoning | None) -> ReasoningUse | None:
    """Return the form of reasoning in the answers to a body; None for a model without reasoning."""
    if model is None or model.format is None:
        return None
    last = _text(body.messages[-1]) if body.continue_final_message and body.messages else None
    return ReasoningUse(model, body.include_reasoning is not False, last)


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "".join(getattr(part, "text", "") for part in message.content)
    return message.content or ""
