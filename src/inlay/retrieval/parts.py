"""Documents as marked parts of a user's message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def marked_parts(texts: Sequence[str], question: str) -> list[dict[str, Any]]:
    """Return the content of a user's message: each text as a marked part, and the question behind them.

    A part holds the text alone. A score or a time in it would make it another text at every request.
    """
    marked = [{"type": "text", "text": part_text(text), "cache_control": {"type": "ephemeral"}} for text in texts]
    return [*marked, {"type": "text", "text": question}]


def part_text(text: str) -> str:
    """Return a document's text as a part has it: with a line break at its end."""
    return text if text.endswith("\n") else f"{text}\n"
