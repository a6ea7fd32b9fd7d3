"""A table of the pieces of earlier prompts, to find text that comes again behind other text.

It has a hash of each piece and a tag of the text before it, no text. Its token ids are compared where its KV is found.

A piece behind one of its first two texts does not count again, until a third text comes. So a conversation that
continues reads the piece as its earlier turns did, from the stored prefix.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

#: The size of the table. A test measures the size of an entry.
MAX_BYTES = 64 << 20
ENTRY_BYTES = 128
_SALT_BYTES = 1024  # of the bookkeeping of a salt
_KNOWN_SHARE = 3 / 4  # of a tenant's entries, at most, for known pieces while the table is full
_DROPPED = 64  # entries that are dropped at a time

#: The hash of a piece with its adapter, and a tag of the text before it, from 0 up to TAGS.
Sighting = tuple[int, int]
TAGS = 255
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
