"""The store of segments: found by key, verified by token ids, evicted when the pool is full."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from inlay.cache.eviction import victims
from inlay.cache.pool import KVPool, Run
from inlay.cache.segment import Segment, SegmentSpec
from inlay.errors import CapacityError

logger = logging.getLogger(__name__)


class SegmentStore:
    """All segments of one pool, by key."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._segments: dict[bytes, Segment] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def tokens(self) -> int:
        """How many tokens the stored segments hold."""
        return sum(segment.tokens for segment in self._segments.values())

    def get(self, spec: SegmentSpec) -> Segment | None:
        """The segment that a spec asks for, if it is stored and its token ids are the same."""
        segment = self._segments.get(spec.key)
        if segment is None:
            return None
        if segment.ids != spec.ids:
            logger.warning("a stored segment has the key of another text; it is not used")
            return None
        self._clock += 1
        segment.used = self._clock
        return segment

    def add(self, spec: SegmentSpec, runs: tuple[Run, ...]) -> Segment:
        """Store a segment whose KV has been written to ``runs``."""
        assert spec.key not in self._segments, "a segment is stored once"
        self._clock += 1
        segment = Segment(spec.key, spec.ids, spec.start, runs, used=self._clock)
        self._segments[spec.key] = segment
        return segment

    def allocate(self, tokens: int, *, after: Run | None = None) -> tuple[Run, ...]:
        """Slots for tokens, evicting unpinned segments if need be. Raises CapacityError."""
        runs = self.pool.allocate(tokens, after=after)
        if runs is None:
            self._evict(tokens)
            runs = self.pool.allocate(tokens, after=after)
        if runs is None:
            size = self.pool.bytes_per_token
            raise CapacityError(
                f"the KV pool has room for {self.pool.free_tokens} more tokens and {tokens} are needed; "
                f"give kv_memory at least {(tokens - self.pool.free_tokens) * size / 2**20:.0f} MiB more"
            )
        return runs

    @contextmanager
    def pinned(self, segments: Iterable[Segment]) -> Iterator[None]:
        """Keep segments from being evicted within a block."""
        held = list(segments)
        for segment in held:
            segment.pins += 1
        try:
            yield
        finally:
            for segment in held:
                segment.pins -= 1

    def clear(self) -> None:
        """Forget every segment that is not pinned."""
        self._remove(segment for segment in list(self._segments.values()) if not segment.pins)

    def _evict(self, tokens: int) -> None:
        missing = self.pool.chunks_for(tokens) - self.pool.free_chunks
        self._remove(victims(self._segments.values(), missing, self.pool.chunks_for))

    def _remove(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            del self._segments[segment.key]
            self.pool.free(segment.runs)
