"""Documents of a prompt: chunks with borders that an edit does not move, and documents as marked parts of a message."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

from inlay.errors import ParameterError

_PARAGRAPH = re.compile(r"\n[ \t]*\n+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def chunks(text: str, *, least: int = 400, most: int = 2_000) -> list[str]:
    """Cut a text into chunks at paragraphs, or at sentences of long paragraphs.

    A border is where the hash of the paragraph behind it is small. So borders stay where they are when text elsewhere
    changes: an edit changes its own chunk and at most its neighbours. Chunks joined give the text again.

    Args:
        least: characters that a chunk has at least, except the last one.
        most: characters that a chunk has at most, except for a sentence that is longer.

    Raises:
        ParameterError: ``least`` is below 1 or above half of ``most``.
    """
    if not 1 <= least <= most / 2:
        raise ParameterError(
            f"least is {least} and most is {most}; give a least of at least 1 and at most half of most",
            code="retrieval.wrong_setting",
        )
    found: list[str] = []
    held = ""
    # one border in as many pieces as fill the room between least and most on average
    for piece in _pieces(text, least):
        if held and (len(held) + len(piece) > most or (len(held) >= least and _begins(piece))):
            found.append(held)
            held = ""
        held += piece
    if held:
        found.append(held)
    return found


def _begins(piece: str) -> bool:
    """Return True if a chunk begins at this piece. It depends on the piece alone."""
    return zlib.crc32(piece.strip().encode()) % 4 == 0


def _pieces(text: str, longest: int) -> list[str]:
    """Cut a text behind each paragraph, and behind sentences of paragraphs longer than ``longest``."""
    paragraphs = _cut(text, _PARAGRAPH)
    return [
        piece
        for paragraph in paragraphs
        for piece in ([paragraph] if len(paragraph) <= longest else _cut(paragraph, _SENTENCE))
    ]


def _cut(text: str, border: re.Pattern[str]) -> list[str]:
    ends = [match.end() for match in border.finditer(text)]
    starts = [0, *ends]
    return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if end > start]


def marked_parts(texts: Sequence[str], question: str) -> list[dict[str, Any]]:
    """Return the content of a user's message: each text as a marked part, and the question behind them.

    A part holds the text alone. A score or a time in it would make it another text at every request.
    """
    marked = [{"type": "text", "text": part_text(text), "cache_control": {"type": "ephemeral"}} for text in texts]
    return [*marked, {"type": "text", "text": question}]


def part_text(text: str) -> str:
    """Return a document's text as a part has it: with a line break at its end."""
    return text if text.endswith("\n") else f"{text}\n"
