"""Spans of free chunks, found by position and by size, and joined with their neighbours when chunks are freed.

Every operation takes logarithmic time in the number of spans. A pool that has run for long may have tens of thousands.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

from inlay.slots import SlotRange

#: Stale entries per live one before a bucket is rebuilt.
_STALE = 2


class FreeSpans:
    """The free chunks among 0 … ``chunks - 1``, as spans that do not touch. All chunks are free at first."""

    def __init__(self, chunks: int) -> None:
        self.chunks = 0  # in all spans
        self._ends: dict[int, int] = {}  # first chunk → end
        self._firsts: dict[int, int] = {}  # end → first chunk
        # Heaps by length, lowest first. A removed span stays in its heap until it is met or the heap is rebuilt.
        self._buckets: dict[int, list[int]] = {}
        self._live: dict[int, int] = {}  # length → number of spans
        self._lengths: list[int] = []  # the lengths in use, sorted; their sum is bounded, so they are few
        self.add(0, chunks)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def ranges(self) -> tuple[SlotRange, ...]:
        """The spans in order of position."""
        return tuple(SlotRange(first, self._ends[first] - first) for first in sorted(self._ends))

    def behind(self, chunk: int) -> int:
        """The number of adjacent free chunks from this one on."""
        return self._ends.get(chunk, chunk) - chunk

    def before(self, chunk: int) -> int:
        """The number of adjacent free chunks up to this one."""
        return chunk - self._firsts.get(chunk, chunk)

    def add(self, first: int, end: int) -> None:
        """Free chunks ``first`` … ``end - 1``."""
        self.chunks += end - first
        if first in self._firsts:
            first = self._forget(self._firsts[first])
        if end in self._ends:
            after = self._ends[end]
            self._forget(end)
            end = after
        self._note(first, end)

    def take(self, first: int, length: int) -> SlotRange:
        """Take the first ``length`` chunks of the span that begins at ``first``."""
        end = self._ends[first]
        self._forget(first)
        if first + length < end:
            self._note(first + length, end)
        self.chunks -= length
        return SlotRange(first, length)

    def smallest(self, length: int) -> int | None:
        """The first chunk of the smallest span of at least that length, the lowest of several. None if there is
        none.
        """
        at = bisect_left(self._lengths, length)
        return self._lowest(self._lengths[at]) if at < len(self._lengths) else None

    def largest(self) -> SlotRange:
        """The largest span, the lowest of several."""
        length = self._lengths[-1]
        return SlotRange(self._lowest(length), length)

    def _lowest(self, length: int) -> int:
        bucket = self._buckets[length]
        while self.behind(bucket[0]) != length:
            heappop(bucket)
        return bucket[0]

    def _note(self, first: int, end: int) -> None:
        self._ends[first], self._firsts[end] = end, first
        length = end - first
        if length not in self._live:
            insort(self._lengths, length)
            self._buckets[length], self._live[length] = [], 0
        self._live[length] += 1
        heappush(self._buckets[length], first)

    def _forget(self, first: int) -> int:
        end = self._ends.pop(first)
        del self._firsts[end]
        length = end - first
        self._live[length] -= 1
        if not self._live[length]:
            del self._live[length], self._buckets[length], self._lengths[bisect_left(self._lengths, length)]
        elif len(self._buckets[length]) > 8 + _STALE * self._live[length]:
            live = {other for other in self._buckets[length] if self.behind(other) == length}
            self._buckets[length] = sorted(live)  # a sorted list is a heap
        return first
