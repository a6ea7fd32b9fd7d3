"""Joins the turns of a conversation for chat templates that want roles to alternate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_BETWEEN = {"type": "text", "text": "\n\n"}
_PLAIN = {"role", "content"}


def joined(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns, with neighbouring texts of one role as one turn. An empty line separates them.

    Past answers are joined without one, because an answer may come in several pieces.
    """
    made: list[dict[str, Any]] = []
    for turn in turns:
        before: dict[str, Any] = made[-1] if made else {"role": ""}
        if before["role"] != turn["role"] or set(before) - _PLAIN or set(turn) - _PLAIN or turn["role"] == "tool":
            made.append(dict(turn))
            continue
        answer = turn["role"] == "assistant"
        if answer and isinstance(before["content"], str) and isinstance(turn["content"], str):
            before["content"] += turn["content"]
            continue
        before["content"] = [*parts_of(before["content"]), *([] if answer else [_BETWEEN]), *parts_of(turn["content"])]
    return made


def parts_of(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of a turn in parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
