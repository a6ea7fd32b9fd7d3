"""The eviction order of a tier's segments, by the same policies as the pool's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from inlay.kv.offload.tier import TierEntry
from inlay.kv.policies import PassCost, Policy, Rank, Use

#: The heap is rebuilt when it holds more than this many ranks for each entry.
_STALE = 2


class TierEvictionQueue:
    """The entries of one tier, and an eviction queue of those that are not pinned. Not thread-safe.

    The queue is a heap with one valid rank per entry, computed when it was pushed. Ranks never fall with a use, so a
    use only updates the entry. An entry at the top whose rank is too low is pushed again with its present rank. So the
    cost of ``take`` does not grow with the number of entries.

    Entries count uses of all processes since the first one. The rank at the last use (``floor``) is known of this
    process only. Entries from before its start count as older.
    """

    def __init__(self, policy: Policy, cost: PassCost | None = None) -> None:
        self._policy = policy
        self._cost = cost or PassCost()
        self._entries: dict[bytes, TierEntry] = {}
        # by key, the rank of the last evicted entry at the time of the entry's last use
        self._floors: dict[bytes, float] = {}
        self._ranks: dict[bytes, Rank] = {}  # the valid ranks in the heap
        self._heap: list[tuple[Rank, bytes]] = []
        self._bytes = 0
        self._floor = 0.0

    @property
    def entries(self) -> Mapping[bytes, TierEntry]:
        """All entries, by key."""
        return self._entries

    @property
    def evictable_bytes(self) -> int:
        """The size of all entries that are not pinned."""
        return self._bytes

    def begin(self, entries: Iterable[TierEntry]) -> None:
        """Add entries that were there before this process started."""
        for entry in entries:
            self._floors[entry.key] = 0.0
            self.note(entry)

    def replace(self, entries: Iterable[TierEntry]) -> None:
        """Replace all entries."""
        now = {entry.key: entry for entry in entries}
        for key in self._entries.keys() - now.keys():
            self.remove(key)
        for entry in now.values():
            if self._entries.get(entry.key) != entry:
                self.note(entry)

    def update(self, changed: Mapping[bytes, TierEntry | None]) -> None:
        """Set or remove the entries of these keys. None removes."""
        for key, entry in changed.items():
            if entry is None:
                self.remove(key)
            elif self._entries.get(key) != entry:
                self.note(entry)

    def note(self, entry: TierEntry) -> None:
        """Add or update an entry."""
        key, before = entry.key, self._entries.get(entry.key)
        if before is None:
            self._floors.setdefault(key, self._floor)
        elif before.used != entry.used:
            self._floors[key] = self._floor
        self._count(before, -1)
        self._entries[key] = entry
        self._count(entry, 1)
        rank = self._rank(entry)
        if entry.pinned:
            self._ranks.pop(key, None)
        elif key not in self._ranks or rank < self._ranks[key]:
            self._push(rank, key)

    def remove(self, key: bytes) -> bool:
        """Remove an entry. Returns True if it was known."""
        entry = self._entries.pop(key, None)
        self._count(entry, -1)
        self._floors.pop(key, None)
        self._ranks.pop(key, None)
        return entry is not None

    def take(self) -> TierEntry | None:
        """Remove the first entry from the queue and return it. Returns None if all are pinned or taken."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) != rank:
                heappop(self._heap)
                continue
            now = self._rank(self._entries[key])
            if now == rank:
                heappop(self._heap)
                del self._ranks[key]
                return self._entries[key]
            self._ranks[key] = now
            heapreplace(self._heap, (now, key))
        return None

    def evicted(self, entry: TierEntry) -> None:
        """Record that an entry from ``take`` was evicted."""
        self._floor = max(self._floor, self._rank(entry)[1])

    def _push(self, rank: Rank, key: bytes) -> None:
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + _STALE * len(self._entries):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)

    def _count(self, entry: TierEntry | None, sign: int) -> None:
        if entry is not None and not entry.pinned:
            self._bytes += sign * entry.size

    def _rank(self, entry: TierEntry) -> Rank:
        floor = self._floors.get(entry.key, 0.0)
        # The first use wrote the entry, the others read it. The time of the last use but one is unknown. For entries
        # that were read, the last use stands in for it.
        before = entry.used if entry.uses else 0.0
        use = Use(entry.tokens, 0, True, entry.used, entry.uses + 1, entry.used, before, floor)
        return self._policy(use, self._cost)
