"""Finds stored text of requests by its content, behind any other text.

The prefix tree finds text behind equal text only. A conversation whose tools change is therefore lost to it, although
its KV is stored. This index knows a hash of every 16 tokens of a stored text. A request that accepts approximations
reads such text at a shift. Its KV then lacks only the change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from inlay.kv.identity import TextOwner
from inlay.kv.segment import Segment

_WINDOW = 16  # tokens
#: Fewer tokens are cheaper to compute than to read as a segment of their own.
LEAST_MOVED = 32
_BASE = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_BASE, power, 2**64) for power in range(_WINDOW)], np.uint64)


class TextIndex:
    """Stored texts by the hashes of their windows of 16 tokens. Where a text is stored twice, the older one is found.

    Attributes:
        version: the number of changes since the start.
    """

    def __init__(self) -> None:
        self._windows: dict[TextOwner, dict[int, tuple[Segment, int]]] = {}
        self.version = 0

    def add(self, segment: Segment) -> None:
        """Add a segment, or its new length. Does nothing for a segment that requests may not find by content."""
        if segment.origin is None or not segment.origin.movable:
            return
        windows = self._windows.setdefault(_owner(segment), {})
        for number, value in enumerate(_aligned(segment.run.ids)):
            windows.setdefault(value, (segment, number * _WINDOW))
        self.version += 1

    def remove(self, segment: Segment) -> None:
        """Remove a segment, before it is shortened or dropped."""
        if segment.origin is None or not segment.origin.movable:
            return
        owner = _owner(segment)
        windows = self._windows.get(owner, {})
        for value in _aligned(segment.run.ids):
            if value in windows and windows[value][0] is segment:
                del windows[value]
        if not windows:
            self._windows.pop(owner, None)
        self.version += 1

    def find(self, owner: TextOwner, ids: Sequence[int]) -> Iterator[tuple[int, Segment, int]]:
        """Yield equal windows: its token in ``ids``, the segment, and its token there. Hashes may collide."""
        windows = self._windows.get(owner)
        if windows is None or len(ids) < LEAST_MOVED:
            return
        views = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.uint64), _WINDOW)
        for offset, value in enumerate((views @ _POWERS).tolist()):
            found = windows.get(value)
            if found is not None:
                yield offset, *found


def _owner(segment: Segment) -> TextOwner:
    assert segment.origin is not None
    return segment.origin.salt, segment.run.before.adapter


def _aligned(ids: Sequence[int]) -> list[int]:
    """Return the hash of each window that begins at a multiple of 16."""
    whole = len(ids) - len(ids) % _WINDOW
    made: list[int] = (np.asarray(ids[:whole], np.uint64).reshape(-1, _WINDOW) @ _POWERS).tolist()
    return made
