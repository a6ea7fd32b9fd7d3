"""Which keys and values go when the pool is full: those unused for longest, and no more of them than are needed.

Segments go from their ends: a chunk of a segment is of use only together with all that stands before it. So a newcomer
that is one chunk short takes one chunk of the segment that was unused for longest, and the rest stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from inlay.kv.pool import KVPool
from inlay.kv.segment import Segment


class UseOrder:
    """Segments by when they were last asked for: a linked list, so that nothing is sorted when room is needed."""

    def __init__(self) -> None:
        self._oldest: Segment | None = None
        self._newest: Segment | None = None

    def __iter__(self) -> Iterator[Segment]:
        """From the one unused for longest on; nothing may change meanwhile."""
        segment = self._oldest
        while segment is not None:
            yield segment
            segment = segment.newer

    def add(self, segment: Segment) -> None:
        """One that is used now."""
        self._link(segment, self._newest, None)

    def add_before(self, segment: Segment, other: Segment) -> None:
        """One that goes just before another does."""
        self._link(segment, other.older, other)

    def touch(self, segment: Segment) -> None:
        """Note a use."""
        if segment is not self._newest:
            self.remove(segment)
            self.add(segment)

    def remove(self, segment: Segment) -> None:
        older, newer = segment.older, segment.newer
        if older is None:
            self._oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        segment.older = segment.newer = None

    def _link(self, segment: Segment, older: Segment | None, newer: Segment | None) -> None:
        segment.older, segment.newer = older, newer
        if older is None:
            self._oldest = segment
        else:
            older.newer = segment
        if newer is None:
            self._newest = segment
        else:
            newer.older = segment


def victims(segments: UseOrder, chunks: int, pool: KVPool) -> list[tuple[Segment, int]]:
    """Segments, each with how many of its tokens may stay, whose ends free just ``chunks`` chunks; none if they can't.

    Least recently used first, and never what is held. A chunk is free when all its owners have gone, so a segment alone
    may free none, and one whose chunks others keep stays: its going would free nothing.
    """
    chosen: list[tuple[Segment, int, list[int]]] = []  # with the chunks that it lets go
    left: Counter[int] = Counter()  # chunk → how many of its owners would be gone
    freed: set[int] = set()
    for segment in segments:
        if len(freed) >= chunks:
            break
        stays, gone = segment.tokens, []
        for first, chunk in _from_its_end(segment, pool.chunk_size):
            if len(freed) >= chunks or first < segment.held:
                break
            stays = first
            gone.append(chunk)
            left[chunk] += 1
            if left[chunk] == pool.owners(chunk):
                freed.add(chunk)
        if gone:
            chosen.append((segment, stays, gone))
    if len(freed) < chunks:
        return []
    return [(segment, stays) for segment, stays, gone in chosen if not freed.isdisjoint(gone)]


def _from_its_end(segment: Segment, size: int) -> Iterator[tuple[int, int]]:
    """The chunks of a segment from its last on, each with the first of its tokens that lies in it."""
    end = segment.tokens
    last: tuple[int, int] | None = None  # two runs of one chunk may follow each other
    for run in reversed(segment.slots):
        end -= run.length
        for chunk in range((run.end - 1) // size, run.first // size - 1, -1):
            first = end + max(0, chunk * size - run.first)
            if last is not None and last[1] != chunk:
                yield last
            last = first, chunk
    if last is not None:
        yield last
