"""Makes modules of unmarked text that comes again: ``find="content"`` of a reuse policy.

The unmarked texts of a prompt are cut by their content (borders.py). A piece that came before behind other text
(seen_pieces.py) becomes a part of its own. The second time it is computed in place, unless it is stored, and the engine
stores it in idle time. From the third time on it is a part like a marked one. Token ids and positions of the prompt
stay as they are.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from inlay.prompt.borders import LEAST, Borders, Ids
from inlay.prompt.placement import ContentPart, Placed, PromptLayout
from inlay.prompt.seen_pieces import TAGS, Seen, SeenPieces, Sighting
from inlay.types import Scope

Range = tuple[int, int]
"""First and last-plus-one."""


class PieceFinder:
    """Finds the pieces of prompts that earlier prompts of the same salt had behind other text. Thread-safe.

    Args:
        tokenizer: of the prompts.
        seen: the table of earlier pieces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seen: SeenPieces | None = None) -> None:
        self.seen = SeenPieces() if seen is None else seen
        self._borders = Borders(tokenizer)

    def find(self, layout: PromptLayout, scope: Scope, adapter: bytes) -> PromptLayout:
        """Return a prompt with its known pieces as parts. Records all its pieces.

        Args:
            layout: a prompt without a schema.
            scope: its owner.
            adapter: the digest of its adapter.
        """
        ids = np.asarray(layout.ids, np.uint32)
        # Parts of an anchor are segments already, and the prefix tree finds the start of a prompt.
        anchor = sum(len(part.ids) for part in layout.anchor)
        pieces = [
            (first + start, first + end)
            for first, last in layout.texts
            for start, end in self._borders.pieces(ids[first:last])
            if first + start >= max(anchor, 1)
        ]
        if not pieces:
            return layout
        seen = self.seen.note(scope.tenant, scope.cache_salt, list(_sightings(ids, pieces, adapter)))
        found = [each for each in zip(pieces, seen, strict=True) if each[1] is not Seen.ONCE]
        return replace(layout, parts=tuple(_split(layout.parts, found))) if found else layout


def _sightings(ids: Ids, pieces: Sequence[Range], adapter: bytes) -> Iterator[Sighting]:
    """Yield the hash of each piece, and a tag of the text before it."""
    before, at = 0, 0
    for first, end in pieces:
        before = hash((before, ids[at:first].tobytes()))
        yield hash((adapter, ids[first:end].tobytes())), before % TAGS
        at = first


def _split(parts: Sequence[Placed], found: Sequence[tuple[Range, Seen]]) -> Iterator[Placed]:
    """Yield parts, with pieces cut out of them as parts of their own. Each piece lies in one part."""
    left = list(reversed(found))
    for part in parts:
        at = part.start
        while left and left[-1][0][1] <= part.end:
            (first, end), seen = left.pop()
            if first > at:
                yield _between(part, at, first)
            origin = part.origin if isinstance(part.origin, ContentPart) else ContentPart(True)
            origin = replace(origin, marked=seen is Seen.OFTEN, leads=False, automatic=True, found=True)
            yield Placed(part.ids[first - part.start : end - part.start], first, origin, part.kept)
            at = end
        if at == part.start:
            yield part
        elif at < part.end:
            yield _between(part, at, part.end)


def _between(part: Placed, first: int, end: int) -> Placed:
    return Placed(part.ids[first - part.start : end - part.start], first, None, part.kept)


def content_ranges(rendered: str, contents: Sequence[str]) -> list[Range]:
    """Return where a rendering has these contents of messages, in characters. A template may write them as JSON.

    Contents that are too short for a piece, and those that the template rewrites, are left out.
    """
    found: list[Range] = []
    at = 0
    for content in contents:
        text = content.strip()
        if len(text) < LEAST:
            continue
        for written in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
            first = rendered.find(written, at)
            if first >= 0:
                at = first + len(written)
                found.append((first, at))
                break
    return found


def token_ranges(offsets: Sequence[Range], ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return the tokens that lie within ranges of characters. ``offsets`` has the characters of each token."""
    starts, ends = ([each[side] for each in offsets] for side in (0, 1))
    found = []
    for first, last in ranges:
        begin, end = bisect_left(starts, first), bisect_right(ends, last)
        if begin < end:
            found.append((begin, end))
    return tuple(found)
