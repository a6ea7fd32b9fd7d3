"""Finds unmarked text that comes again behind other text, and makes modules of it: ``find="content"``.

The unmarked texts of a prompt are cut by their content (borders.py). ``SeenPieces`` has a hash of each piece of earlier
prompts and a tag of the text before it, no text. Token ids are compared where their KV is found. A piece behind one of
its first two texts does not count again, until a third text comes. So a conversation that continues reads the piece as
its earlier turns did, from the stored prefix.

A piece that came before behind other text becomes a part of its own. The second time it is computed in place, unless it
is stored, and the engine stores it in idle time. From the third time on it is a part like a marked one. Token ids and
positions of the prompt stay as they are.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from inlay.prompt.borders import LEAST, Borders, Ids
from inlay.prompt.placement import ContentPart, Placed, PromptLayout
from inlay.types import Scope

#: The size of the table. A test measures the size of an entry.
MAX_BYTES = 64 << 20
ENTRY_BYTES = 128
_SALT_BYTES = 1024  # of the bookkeeping of a salt
_KNOWN_SHARE = 3 / 4  # of a tenant's entries, at most, for known pieces while the table is full
_DROPPED = 64  # entries that are dropped at a time
#: The hash of a piece with its adapter, and a tag of the text before it, from 0 up to TAGS.
Sighting = tuple[int, int]
TAGS = 1 << 15  # both tags of a piece make an int of 28 bytes
_MANY = -1  # in place of the tags of a known piece


class Seen(Enum):
    """How often a piece has come behind different texts, this time included.

    Attributes:
        ONCE: it is new, or it comes again behind one of its first two texts and has had no third one.
        TWICE: it comes behind a second text.
        OFTEN: it came behind two other texts before.
    """

    ONCE = 1
    TWICE = 2
    OFTEN = 3


@dataclass(eq=False, slots=True)
class _Pieces:
    """The pieces of one salt, the most recently seen last.

    Attributes:
        once: hash → tag of the text before the piece.
        known: hash → both tags of a piece that came behind two texts, or _MANY.
    """

    once: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return _SALT_BYTES + ENTRY_BYTES * (len(self.once) + len(self.known))


@dataclass(eq=False, slots=True)
class _Tenant:
    """The pieces of one tenant by salt, the most recently active salt last, and their size."""

    salts: OrderedDict[str, _Pieces] = field(default_factory=OrderedDict)
    bytes: int = 0
    known_bytes: int = 0


class SeenPieces:
    """The pieces of each salt, in bounded memory. Thread-safe.

    A full table drops entries of the tenant with the largest part of it. New text replaces pieces seen once, so it
    replaces neither known pieces nor those of smaller tenants.

    Args:
        max_bytes: the size of the table.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, _Tenant] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The size of the table's contents."""
        return self._bytes

    def note(self, tenant: str, salt: str, sightings: Sequence[Sighting]) -> list[Seen]:
        """Record the pieces of a prompt, in order. Returns how often each one was seen, here or in earlier prompts."""
        with self._lock:
            mine = self._tenants.setdefault(tenant, _Tenant())
            pieces = mine.salts.get(salt)
            if pieces is None:
                pieces = mine.salts[salt] = _Pieces()
                self._grow(mine, _SALT_BYTES)
            mine.salts.move_to_end(salt)
            found = [self._sees(mine, pieces, *sighting) for sighting in sightings]
            while self._bytes > self._max_bytes:
                self._shrink()
            return found

    def forget(self, salt: str) -> None:
        """Drop the pieces of a salt."""
        with self._lock:
            for name in list(self._tenants):
                self._drop_salt(name, salt)

    def _sees(self, mine: _Tenant, pieces: _Pieces, piece: int, tag: int) -> Seen:
        both = pieces.known.pop(piece, None)
        if both is not None:
            again = both != _MANY and tag in divmod(both, TAGS)
            pieces.known[piece] = both if again else _MANY  # the most recent one
            return Seen.ONCE if again else Seen.OFTEN
        before = pieces.once.pop(piece, None)
        if before is not None and before != tag:
            pieces.known[piece] = before * TAGS + tag
            mine.known_bytes += ENTRY_BYTES
            return Seen.TWICE
        pieces.once[piece] = tag
        self._grow(mine, ENTRY_BYTES if before is None else 0)
        return Seen.ONCE

    def _grow(self, mine: _Tenant, size: int) -> None:
        mine.bytes += size
        self._bytes += size

    def _shrink(self) -> None:
        """Drop some entries of the largest tenant, from its least recently active salt that has any."""
        name, mine = max(self._tenants.items(), key=lambda item: item[1].bytes)
        crowded = mine.known_bytes > _KNOWN_SHARE * mine.bytes
        kinds = ("known", "once") if crowded else ("once", "known")
        salt, kind = next(
            ((salt, kind) for kind in kinds for salt, pieces in mine.salts.items() if getattr(pieces, kind)),
            (next(iter(mine.salts)), "once"),
        )
        pieces = mine.salts[salt]
        dropped = _drop(pieces.known if kind == "known" else pieces.once)
        mine.known_bytes -= ENTRY_BYTES * dropped if kind == "known" else 0
        self._grow(mine, -ENTRY_BYTES * dropped)
        if not pieces.once and not pieces.known:
            self._drop_salt(name, salt)

    def _drop_salt(self, name: str, salt: str) -> None:
        mine = self._tenants[name]
        pieces = mine.salts.pop(salt, None)
        if pieces is not None:
            mine.known_bytes -= ENTRY_BYTES * len(pieces.known)
            self._grow(mine, -pieces.bytes)
        if not mine.salts:
            del self._tenants[name]


def _drop(entries: dict[int, int]) -> int:
    """Drop the least recent entries. Returns their number."""
    old = list(islice(entries, _DROPPED))
    for each in old:
        del entries[each]
    return len(old)


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
