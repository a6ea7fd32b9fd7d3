"""A tier that keeps copies in memory, and is filled as the ones below the host tier are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import Miss, TierEntry, TierMissError
from inlay.types import TierStats


class MemoryTier:
    """Copies in memory. For keys in ``broken`` the tier reports the whole segment and returns half of it."""

    name = "memory"
    codec = "none"

    def __init__(self) -> None:
        self.segments: dict[bytes, tuple[SegmentRecord, list[Slab]]] = {}
        self.broken: set[bytes] = set()
        self.asked: list[bytes] = []

    def holds(self, key: bytes) -> bool:
        return key in self.segments

    def unsure(self, key: bytes) -> bool:
        return False

    def find(self, keys: Sequence[bytes]) -> None:
        """All contents are known."""

    def get(self, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
        self.asked.append(asked.key)
        record, slabs = self.segments[asked.key]
        assert record.same(asked)
        for layer, slab in enumerate(slabs):
            if layer and asked.key in self.broken:
                raise TierMissError(Miss.CORRUPT)
            take(layer, slab)

    def put(self, record: SegmentRecord, slabs: Iterable[Slab]) -> bool:
        self.segments[record.key] = record, [slab.copy() for slab in slabs]
        return True

    def delete(self, key: bytes) -> bool:
        return self.segments.pop(key, None) is not None

    def expire(self, key: bytes, ttl_s: float) -> None:
        """Contents do not expire."""

    def left_s(self, key: bytes) -> float | None:
        return None

    def iterate(self) -> Iterator[TierEntry]:
        return iter([TierEntry(key, record.tokens, 0, "", 0, 0) for key, (record, _) in self.segments.items()])

    def labelled(self, labels: Iterable[bytes]) -> list[TierEntry]:
        wanted = frozenset(labels)
        records = [record for record, _ in self.segments.values() if not wanted.isdisjoint(record.labels)]
        return [TierEntry.of(record, 0, 0) for record in records]

    has_room = False

    def stats(self) -> TierStats:
        return TierStats(segments=len(self.segments))

    def refresh(self) -> None:
        """No other process writes here."""

    def close(self) -> None:
        self.segments.clear()
