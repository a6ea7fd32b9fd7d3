"""Parts of a conversation as segments: what each attends to when it is encoded, and whether it is one at all."""

from __future__ import annotations

from collections.abc import Container

from inlay.cache.segment import KeyMaker, SegmentSpec, specify
from inlay.placement import ContentPart, Placed, PromptLayout

#: Of a part that nobody marked, fewer tokens than this are cheaper computed than approximated.
_WORTH_FINDING = 16


class ContentSpecs:
    """The specs of one conversation's parts.

    context: "isolated", where a part sees itself alone, or "anchored", where it also sees what stands before the first
        part of all: the system turn, to which the template's opening belongs.
    movable: whether a segment may be encoded at a canonical start and read at a shift.
    salt: whose the conversation is.
    """

    def __init__(self, prompt: PromptLayout, *, context: str, movable: bool, keys: KeyMaker, salt: bytes) -> None:
        first = next(number for number, part in enumerate(prompt.parts) if part.origin is not None)
        anchor: tuple[SegmentSpec, ...] = ()
        self._by_start: dict[int, SegmentSpec] = {}
        if context == "anchored" and first:
            ids = tuple(token for part in prompt.parts[:first] for token in part.ids)
            anchor = (specify(ids, 0, (), keys, salt),)
        behind = anchor[0].end if anchor else 0
        for part in prompt.parts[first:]:
            if isinstance(part.origin, ContentPart):
                start = behind if movable else part.start
                self._by_start[part.start] = specify(part.ids, start, anchor, keys, salt)
        self.anchor = anchor[0] if anchor else None
        self._parts = prompt.parts

    def to_find(self) -> list[SegmentSpec]:
        """Those that are segments only if they are stored."""
        return [
            self._by_start[part.start]
            for part in self._parts
            if isinstance(part.origin, ContentPart) and not part.origin.marked and len(part.ids) >= _WORTH_FINDING
        ]

    def parts(self) -> list[Placed]:
        """The conversation's parts, the anchor as one."""
        if self.anchor is None:
            return list(self._parts)
        rest = [part for part in self._parts if part.start >= self.anchor.end]
        return [Placed(self.anchor.ids, 0, ContentPart(marked=True)), *rest]

    def spec(self, part: Placed, stored: Container[bytes]) -> SegmentSpec | None:
        """The segment that a part is, or None for text that is computed where it stands. stored: keys."""
        if not isinstance(part.origin, ContentPart):
            return None
        if self.anchor is not None and part.start == 0:
            return self.anchor
        spec = self._by_start[part.start]
        return spec if part.origin.marked or spec.key in stored else None
