"""A conversation whose messages come in parts, as numbers: every part is tokenized alone and stays one run of tokens.

To such a prompt its system turn is what text outside modules is to a schema: always present. A part that the request
marks is a module; another part of a later turn is looked up by its content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inlay.chat import ChatTemplate, Trim
from inlay.placement import ContentPart, Placed, PromptLayout
from inlay.tokens import TextEncoder


def lay_out_conversation(
    messages: Sequence[Mapping[str, Any]], encoder: TextEncoder, template: ChatTemplate
) -> PromptLayout:
    """Place messages, some of whose contents are lists of ``{"type": "text", "text": …, "cache_control"?: …}``.

    Raises ModelError where the template refuses the turns.
    """
    roles = [message["role"] for message in messages]
    pieces = template.pieces(roles, generation=True)
    trims = template.trims(roles, generation=True)
    walk = _Walk(encoder)
    bodies = []
    for message, piece, trim in zip(messages, pieces, trims, strict=False):
        walk.template(piece)
        parts = _settled(_parts(message["content"]), trim)
        bodies.append("".join(part.text for part in parts))
        for part in parts:
            walk.content(part, system=message["role"] == "system")
    walk.template(pieces[-1])
    template.verify(roles, bodies, pieces)
    return PromptLayout(None, tuple(walk.parts), "".join(walk.texts))


@dataclass(slots=True)
class _Text:
    """A part of a message. whole: whether it is a part at all, not a message given as one text."""

    text: str
    whole: bool
    marked: bool


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[_Text]:
    if isinstance(content, str):
        return [_Text(content, whole=False, marked=False)]
    return [_Text(part["text"], whole=True, marked=bool(part.get("cache_control"))) for part in content]


def _settled(parts: list[_Text], trim: Trim) -> list[_Text]:
    """The parts of a turn as its template leaves them. Those that are marked stay: they are shared."""
    for ordered, strip in ((parts, trim.start), (parts[::-1], trim.end)):
        for part in ordered:
            if part.marked:
                break
            part.text = strip(part.text)
            if part.text:
                break
    return parts


@dataclass
class _Walk:
    encoder: TextEncoder
    parts: list[Placed] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    at: int = 0

    def template(self, piece: str) -> None:
        self.texts.append(piece)
        self._place(self.encoder.template(piece), None)

    def content(self, part: _Text, *, system: bool) -> None:
        self.texts.append(part.text)
        origin = ContentPart(part.marked) if part.marked or (part.whole and not system) else None
        self._place(self.encoder.text(part.text), origin)

    def _place(self, ids: tuple[int, ...], origin: ContentPart | None) -> None:
        if ids:
            self.parts.append(Placed(ids, self.at, origin))
            self.at += len(ids)
