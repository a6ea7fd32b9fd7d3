"""Which segments go when the pool is full: the ones unused for longest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from inlay.cache.segment import Segment


def victims(segments: Iterable[Segment], chunks: int, chunks_for: Callable[[int], int]) -> list[Segment]:
    """Unpinned segments, least recently used first, that together hold at least ``chunks`` chunks; else none."""
    chosen: list[Segment] = []
    for segment in sorted((s for s in segments if not s.pins), key=lambda s: s.used):
        if chunks <= 0:
            break
        chosen.append(segment)
        chunks -= chunks_for(segment.tokens)
    return chosen if chunks <= 0 else []
