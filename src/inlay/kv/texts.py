"""Finds stored text of requests by its content, behind any other text.

The prefix tree finds text behind equal text only. A conversation whose tools change is therefore lost to it, although
its KV is stored. This index knows a hash of every 16 tokens of a stored text. A request that accepts approximations
reads such text at a shift. Its KV then lacks only the change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from inlay.kv.identity import TextOwner
from inlay.kv.segment import Segment

#: The tokens of a window.
WINDOW = 16
#: Fewer tokens are cheaper to compute than to read as a segment of their own.
LEAST_MOVED = 32
_BASE = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_BASE, power, 2**64) for power in range(WINDOW)], np.uint64)


#: The hash of each window of a text, by the number of its first token: (tokens - 15,), uint64.
Windows = npt.NDArray[np.uint64]

#: Copies of one window that are compared. Others are the same text in the same place.
_MOST_COPIES = 4
_BLOCK = 1024  # windows that are looked up at a time


def windows_of(ids: Sequence[int]) -> Windows:
    """Hash each window of a text. A suffix of the result belongs to the same suffix of the text."""
    if len(ids) < WINDOW:
        return np.empty(0, np.uint64)
    found: Windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.uint64), WINDOW) @ _POWERS
    return found


class TextIndex:
    """Stored texts by the hashes of their windows of 16 tokens. A text that is stored twice is found until both go.

    Attributes:
        version: the number of changes since the start.
    """

    def __init__(self) -> None:
        # By owner and hash: the segments with that window, oldest first, each with the window's first token.
        self._windows: dict[TextOwner, dict[int, dict[Segment, int]]] = {}
        self.version = 0

    def add(self, segment: Segment) -> None:
        """Add a segment. Does nothing for a segment that requests may not find by content."""
        if segment.origin is None or not segment.origin.movable:
            return
        windows = self._windows.setdefault(_owner(segment), {})
        for number, value in enumerate(_aligned(segment.run.ids)):
            windows.setdefault(value, {}).setdefault(segment, number * WINDOW)
        self.version += 1

    def remove(self, segment: Segment, kept: int = 0) -> None:
        """Remove a segment behind its first ``kept`` tokens, before it is shortened or dropped."""
        if segment.origin is None or not segment.origin.movable:
            return
        owner, first = _owner(segment), kept - kept % WINDOW
        windows = self._windows.get(owner, {})
        for value in _aligned(segment.run.ids[first:]):
            copies = windows.get(value, {})
            if copies.get(segment, -1) >= first:
                del copies[segment]
                if not copies:
                    del windows[value]
        if not windows:
            self._windows.pop(owner, None)
        self.version += 1

    def find(self, owner: TextOwner, windows: Windows) -> Iterator[tuple[int, Segment, int]]:
        """Yield equal windows: its token in the text, the segment, and its token there. Hashes may collide.

        Args:
            windows: of the text, from ``windows_of``.
        """
        known = self._windows.get(owner)
        if known is None or len(windows) <= LEAST_MOVED - WINDOW:
            return
        for first in range(0, len(windows), _BLOCK):
            for offset, value in enumerate(windows[first : first + _BLOCK].tolist(), first):
                for segment, into in islice(known.get(value, {}).items(), _MOST_COPIES):
                    yield offset, segment, into


def _owner(segment: Segment) -> TextOwner:
    assert segment.origin is not None
    return segment.origin.salt, segment.run.before.adapter


def _aligned(ids: Sequence[int]) -> list[int]:
    """Return the hash of each window that begins at a multiple of 16."""
    whole = len(ids) - len(ids) % WINDOW
    made: list[int] = (np.asarray(ids[:whole], np.uint64).reshape(-1, WINDOW) @ _POWERS).tolist()
    return made
