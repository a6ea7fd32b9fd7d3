"""Counters of a tier since the start of the process, for its stats."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from inlay.kv.offload.tier import Miss, TierEntry
from inlay.types import TierStats


class TierCounts:
    """Reads, writes and evictions of one tier. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[str] = Counter()
        self._hits = self._hit_tokens = self._writes = self._written = self._refused = self._evictions = 0
        self._evicted_age_s = 0.0

    def hit(self, tokens: int) -> None:
        """Count a read segment."""
        with self._lock:
            self._hits += 1
            self._hit_tokens += tokens

    def missed(self, reason: Miss) -> None:
        """Count a miss."""
        with self._lock:
            self._misses[reason.value] += 1

    def wrote(self, size: int) -> None:
        """Count a written segment of ``size`` bytes."""
        with self._lock:
            self._writes += 1
            self._written += size

    def refused(self) -> None:
        """Count a segment that was not stored."""
        with self._lock:
            self._refused += 1

    def evicted(self, ages_s: Iterable[float]) -> None:
        """Count evicted segments. ``ages_s`` are the seconds since each was last read."""
        ages = list(ages_s)
        with self._lock:
            self._evictions += len(ages)
            self._evicted_age_s += sum(ages)

    def stats(self, entries: Iterable[TierEntry], **more: Any) -> TierStats:
        """The counters and the current contents. ``more`` are further fields of TierStats."""
        held = list(entries)
        with self._lock:
            return TierStats(
                segments=len(held),
                tokens=sum(entry.tokens for entry in held),
                bytes=sum(entry.size for entry in held),
                hits=self._hits,
                hit_tokens=self._hit_tokens,
                misses=tuple(sorted(self._misses.items())),
                writes=self._writes,
                written_bytes=self._written,
                refused=self._refused,
                evictions=self._evictions,
                evicted_age_s=self._evicted_age_s,
                **more,
            )
