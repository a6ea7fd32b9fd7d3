"""Which segments go when the pool is full: the ones unused for longest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from inlay.cache.pool import KVPool
from inlay.cache.segment import Segment


def victims(segments: Iterable[Segment], chunks: int, pool: KVPool) -> list[Segment]:
    """Segments that nobody holds, least recently used first, whose going frees at least ``chunks`` chunks; else none.

    A chunk is free when all its owners have gone, so a segment alone may free none, and one whose chunks others keep
    stays: its going would free nothing.
    """
    chosen: list[Segment] = []
    left: Counter[int] = Counter()  # chunk → how many of its owners would be gone
    freed: set[int] = set()
    for segment in sorted((s for s in segments if not s.holds), key=lambda s: s.used):
        if len(freed) >= chunks:
            break
        chosen.append(segment)
        for chunk in pool.chunks_of(segment.slots):
            left[chunk] += 1
            if left[chunk] == pool.owners(chunk):
                freed.add(chunk)
    if len(freed) < chunks:
        return []
    return [segment for segment in chosen if not freed.isdisjoint(pool.chunks_of(segment.slots))]
