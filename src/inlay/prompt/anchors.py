"""A table of the anchors of earlier requests, to notice text that changes from request to request.

A date in the system turn changes the anchor of every module, so none would be found again. The table keeps the anchor
that modules were encoded behind. A request with a version of it reads these modules.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

_MAX_BYTES = 4 << 20
_MAX_ANCHORS = 4  # for one salt
_SALT_BYTES = 512  # of an entry, without its anchors
_TOKEN_BYTES = 4
_SETTLED = 32  # requests in a row with one anchor, after which it becomes a base

Anchor = tuple[tuple[tuple[int, ...], bool], ...]
"""The parts of an anchor: their token ids, and True for marked ones."""


@dataclass(frozen=True, slots=True)
class Changed:
    """An anchor that is a version of an earlier one.

    Args:
        base: the earlier anchor.
        first: the number of the first token that differs.
        tokens: the number of tokens in the new anchor.
        news: True at the first reported change of a salt.
    """

    base: Anchor
    first: int
    tokens: int
    news: bool


@dataclass(slots=True)
class _Base:
    """The anchor that modules are encoded behind.

    Args:
        ids: its tokens, 4 bytes each.
        parts: the length of each part, and True for marked ones.
        latest: the hash of its latest version.
        times: how often in a row that version was used.
    """

    ids: bytes
    parts: tuple[tuple[int, bool], ...]
    latest: int
    times: int = 1

    @classmethod
    def of(cls, anchor: Anchor, ids: bytes) -> _Base:
        return cls(ids, tuple((len(part), marked) for part, marked in anchor), hash(ids))

    @property
    def anchor(self) -> Anchor:
        ids, at, parts = np.frombuffer(self.ids, "<u4").tolist(), 0, []
        for length, marked in self.parts:
            parts.append((tuple(ids[at : at + length]), marked))
            at += length
        return tuple(parts)

    def comes(self, ids: bytes) -> int:
        """Record a version. Returns how often in a row it was used."""
        version = hash(ids)
        self.times = self.times + 1 if version == self.latest else 1
        self.latest = version
        return self.times


@dataclass(slots=True)
class _SaltAnchors:
    """The state of one salt: its bases, the most recently used last, and whether a change was reported."""

    bases: list[_Base] = field(default_factory=list)
    told: bool = False

    @property
    def bytes(self) -> int:
        return _SALT_BYTES + sum(len(base.ids) for base in self.bases)


class SeenAnchors:
    """The latest anchors of each salt, in at most 4 MiB. Thread-safe.

    Two anchors are versions of one text if their beginnings and ends match and at most half of it differs. The first
    version is the base of the others. A version in 32 requests in a row becomes the new base.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _SaltAnchors] = OrderedDict()  # by salt, the most recently used last
        self._bytes = 0
        self._lock = threading.Lock()

    def note(self, salt: str, anchor: Anchor, *, tell: bool = True) -> Changed | None:
        """Record the anchor of a request. Returns its base if it is a version of one, else None.

        ``tell`` is True if the caller reports a change to the user.
        """
        ids = np.asarray([token for part, _ in anchor for token in part], "<u4").tobytes()
        with self._lock:
            entry = self._entries.pop(salt, None)
            if entry is None:
                entry = _SaltAnchors()
            else:
                self._bytes -= entry.bytes
            changed = _noted(entry, anchor, ids, tell=tell)
            self._entries[salt] = entry
            self._bytes += entry.bytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].bytes
            return changed

    def forget(self, salt: str) -> None:
        """Drop the anchors of a salt."""
        with self._lock:
            entry = self._entries.pop(salt, None)
            self._bytes -= 0 if entry is None else entry.bytes


def _noted(entry: _SaltAnchors, anchor: Anchor, ids: bytes, *, tell: bool) -> Changed | None:
    base, first = _base_of(entry, ids)
    if base is None or (base.comes(ids) >= _SETTLED and first is not None):
        if base is not None:
            entry.bases.remove(base)
        entry.bases = [*entry.bases, _Base.of(anchor, ids)][-_MAX_ANCHORS:]
        return None
    entry.bases.remove(base)
    entry.bases.append(base)
    if first is None:
        return None
    news = tell and not entry.told
    entry.told |= tell
    return Changed(base.anchor, first, len(ids) // _TOKEN_BYTES, news)


def _base_of(entry: _SaltAnchors, ids: bytes) -> tuple[_Base | None, int | None]:
    """Return the base of these ids and the first token that differs, or None for each."""
    for base in reversed(entry.bases):
        if base.ids == ids:
            return base, None
    for base in reversed(entry.bases):
        first = _first_change(base.ids, ids)
        if first is not None:
            return base, first
    return None, None


def _first_change(before: bytes, after: bytes) -> int | None:
    """Return the first token that differs between versions of one text; None for two different texts."""
    one, other = np.frombuffer(before, "<u4"), np.frombuffer(after, "<u4")
    begins = _alike(one, other)
    ends = _alike(one[begins:][::-1], other[begins:][::-1])
    return begins if 2 * (begins + ends) >= max(len(one), len(other)) else None


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays."""
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    return length if same.all() else int(same.argmin())
