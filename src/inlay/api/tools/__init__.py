"""Calls of tools in answers: how they are told from text, and OpenAI's form of them, whole and piece by piece."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from inlay.api.tools.formats import ModelTools
from inlay.api.tools.parsers import AnswerParser, Delta, FreeParser, HeldParser

__all__ = ["AnswerParser", "Delta", "ToolUse", "as_delta", "as_message", "finish_reason"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request does with tools.

    model: how the model writes calls. names: of the functions that it may call.
    held: whether a grammar holds the answer to calls. parallel: whether there may be more than one.
    """

    model: ModelTools
    names: frozenset[str]
    held: bool
    parallel: bool

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        return HeldParser() if self.held else FreeParser(self.model, self.names, parallel=self.parallel)


def as_message(use: ToolUse, text: str, response: str, choice: int) -> dict[str, Any]:
    """The ``content`` and ``tool_calls`` of a whole answer's message. response, choice: see ``as_delta``."""
    parser = use.parser()
    deltas = [*parser.feed(text), *parser.finish()]
    content = "".join(delta.content for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(_opened(delta, response, choice))
        elif delta.call is not None:
            calls[delta.call]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"content": content or None if calls else content}
    return {**message, "tool_calls": calls} if calls else message


def as_delta(delta: Delta, response: str, choice: int) -> dict[str, Any]:
    """The ``delta`` of a chunk.

    response: what tells the response from others. choice: the number of the answer. Ids of calls are made of both.
    """
    if delta.call is None:
        return {"content": delta.content}
    piece = {"index": delta.call}
    if delta.name is not None:
        return {"tool_calls": [piece | _opened(delta, response, choice)]}
    return {"tool_calls": [{**piece, "function": {"arguments": delta.arguments}}]}


def finish_reason(reason: str | None, *, calls: bool) -> str | None:
    """OpenAI's ``finish_reason``. reason: the engine's. calls: whether the answer calls a tool."""
    return "tool_calls" if calls and reason == "stop" else reason


def _opened(delta: Delta, response: str, choice: int) -> dict[str, Any]:
    """A call as its first piece has it."""
    digest = hashlib.sha256(f"{response} {choice} {delta.call}".encode()).hexdigest()
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": f"call_{digest[:24]}", "type": "function", "function": function}
