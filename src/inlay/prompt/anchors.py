"""A table of the anchors of earlier requests, to notice text that changes from request to request.

An anchor is the text that a module of a message attends to: the system turn (conversation.py). A date in it changes the
anchor of every module, so no module would be found again. The table keeps the anchor that modules were encoded behind.
A request with a version of this anchor reads these modules.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_MAX_BYTES = 4 << 20
_MAX_ANCHORS = 4  # for one salt
_SALT_BYTES = 512  # of an entry, without its anchors
_TOKEN_BYTES = 4
_SETTLED = 32  # requests in a row with one anchor, after which it becomes a base
#: Versions of one text have at least this many tokens in common, and at least this share of the longer one.
_LEAST_ALIKE, _SHARE_ALIKE = 16, 3 / 4

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
        own: the tokens of the caller's text in it, 4 bytes each.
        parts: the length of each part, and True for marked ones.
        latest: the hash of its latest version.
        times: how often in a row that version was used.
    """

    ids: bytes
    own: bytes
    parts: tuple[tuple[int, bool], ...]
    latest: int
    times: int = 1

    @classmethod
    def of(cls, anchor: Anchor, ids: bytes, own: bytes) -> _Base:
        return cls(ids, own, tuple((len(part), marked) for part, marked in anchor), hash(ids))

    @property
    def anchor(self) -> Anchor:
        ids, at, parts = np.frombuffer(self.ids, "<u4").tolist(), 0, []
        for length, marked in self.parts:
            parts.append((tuple(ids[at : at + length]), marked))
            at += length
        return tuple(parts)

    def times_of(self, ids: bytes) -> int:
        """Return how often in a row a version was used, counting a use now."""
        return self.times + 1 if hash(ids) == self.latest else 1

    def comes(self, ids: bytes) -> None:
        """Record a use of a version."""
        self.times, self.latest = self.times_of(ids), hash(ids)


@dataclass(slots=True)
class _SaltAnchors:
    """The state of one salt: its bases, the most recently used last, and whether a change was reported."""

    bases: list[_Base] = field(default_factory=list)
    told: bool = False

    @property
    def bytes(self) -> int:
        return _SALT_BYTES + sum(len(base.ids) + len(base.own) for base in self.bases)


class SeenAnchors:
    """The latest anchors of each salt, in at most 4 MiB. Thread-safe.

    Two anchors are versions of one text if the caller's text in them is the same, or the same except one stretch: at
    most a quarter of its tokens, and at least 16 others. The template's tokens do not count, because all requests share
    them. The first version is the base of the others. A version in 32 requests in a row becomes the new base.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _SaltAnchors] = OrderedDict()  # by salt, the most recently used last
        self._bytes = 0
        self._lock = threading.Lock()

    def note(self, salt: str, anchor: Anchor, own: Sequence[int], *, tell: bool = True) -> Changed | None:
        """Record the anchor of a request, and compare it with earlier anchors of the salt.

        Args:
            salt: the cache salt of the request.
            anchor: the request's anchor.
            own: the token ids of the caller's text in the anchor.
            tell: True if the caller reports a change to the user.

        Returns:
            The difference to the base if the anchor is another version of an earlier one. None for a new text, for the
            base itself, and if this version becomes the new base.
        """
        ids, own_ids = _anchor_ids(anchor), _as_bytes(own)
        with self._lock:
            entry = self._entries.pop(salt, None)
            if entry is None:
                entry = _SaltAnchors()
            else:
                self._bytes -= entry.bytes
            changed = _noted(entry, anchor, ids, own_ids, tell=tell)
            self._entries[salt] = entry
            self._bytes += entry.bytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].bytes
            return changed

    def base_of(self, salt: str, anchor: Anchor, own: Sequence[int]) -> Anchor | None:
        """Return ``note(…).base`` without recording anything. None if ``note`` would return None."""
        ids = _anchor_ids(anchor)
        with self._lock:
            entry = self._entries.get(salt)
            base = None if entry is None else _base_of(entry, ids, _as_bytes(own))
            return None if base is None or base.ids == ids or base.times_of(ids) >= _SETTLED else base.anchor

    def forget(self, salt: str) -> None:
        """Drop the anchors of a salt."""
        with self._lock:
            entry = self._entries.pop(salt, None)
            self._bytes -= 0 if entry is None else entry.bytes


def _noted(entry: _SaltAnchors, anchor: Anchor, ids: bytes, own: bytes, *, tell: bool) -> Changed | None:
    base = _base_of(entry, ids, own)
    if base is not None:
        base.comes(ids)
        entry.bases.remove(base)
    if base is None or (base.times >= _SETTLED and base.ids != ids):
        entry.bases = [*entry.bases, _Base.of(anchor, ids, own)][-_MAX_ANCHORS:]
        return None
    entry.bases.append(base)
    if base.ids == ids:
        return None
    news = tell and not entry.told
    entry.told |= tell
    first = _alike(np.frombuffer(base.ids, "<u4"), np.frombuffer(ids, "<u4"))
    return Changed(base.anchor, first, len(ids) // _TOKEN_BYTES, news)


def _base_of(entry: _SaltAnchors, ids: bytes, own: bytes) -> _Base | None:
    """Return the base with these ids, or else the latest one of which they are a version."""
    same = (base for base in reversed(entry.bases) if base.ids == ids)
    alike = (base for base in reversed(entry.bases) if _are_versions(base.own, own))
    return next(same, None) or next(alike, None)


def _are_versions(before: bytes, after: bytes) -> bool:
    """True if two callers' texts are versions of one text."""
    if before == after:
        return True
    one, other = np.frombuffer(before, "<u4"), np.frombuffer(after, "<u4")
    begins = _alike(one, other)
    alike = begins + _alike(one[begins:][::-1], other[begins:][::-1])
    return alike >= max(_LEAST_ALIKE, _SHARE_ALIKE * max(len(one), len(other)))


def _anchor_ids(anchor: Anchor) -> bytes:
    return _as_bytes([token for part, _ in anchor for token in part])


def _as_bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<u4").tobytes()


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays."""
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    return length if same.all() else int(same.argmin())
