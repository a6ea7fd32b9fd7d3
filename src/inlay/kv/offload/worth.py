"""In which order a tier's segments go, by the policies that the pool has, from what its entries say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from inlay.kv.offload.tier import TierEntry
from inlay.kv.policies import PassCost, Policy, Rank, Use

#: The heap may hold so many ranks for each entry before those that count no more are dropped.
_STALE = 2


class Worth:
    """The entries of one tier, and in the order of its policy those that may go: all that are not pinned.

    A heap with one rank for each, as it was when that was made. Ranks do not fall with a use, so a use only notes
    facts, and an entry that is met with a rank too low goes back with the right one: what it takes to find the next
    one does not grow with how many there are.

    What an entry says goes back to its first use, whoever that was by; only what had been evicted when it was used last
    is known of this process alone: what was there before it began is taken to be older. One thread at a time.
    """

    def __init__(self, policy: Policy, cost: PassCost | None = None) -> None:
        self._policy = policy
        self._cost = cost or PassCost()
        self._entries: dict[bytes, TierEntry] = {}
        self._floors: dict[bytes, float] = {}  # what had gone by the last use of each
        self._ranks: dict[bytes, Rank] = {}  # those in the heap that count
        self._heap: list[tuple[Rank, bytes]] = []
        self._bytes = 0
        self._floor = 0.0

    @property
    def entries(self) -> Mapping[bytes, TierEntry]:
        """All of them, by key."""
        return self._entries

    @property
    def evictable_bytes(self) -> int:
        """What those take that may go."""
        return self._bytes

    def begin(self, entries: Iterable[TierEntry]) -> None:
        """What was there before this process began."""
        for entry in entries:
            self._floors[entry.key] = 0.0
            self.note(entry)

    def replace(self, entries: Iterable[TierEntry]) -> None:
        """What there is now, in place of what was thought to be."""
        now = {entry.key: entry for entry in entries}
        for key in self._entries.keys() - now.keys():
            self.remove(key)
        for entry in now.values():
            if self._entries.get(entry.key) != entry:
                self.note(entry)

    def update(self, changed: Mapping[bytes, TierEntry | None]) -> None:
        """What there is now under these keys; None for nothing."""
        for key, entry in changed.items():
            if entry is None:
                self.remove(key)
            elif self._entries.get(key) != entry:
                self.note(entry)

    def note(self, entry: TierEntry) -> None:
        """There is an entry, or another is said of one that is known."""
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
        """Forget one; returns whether it was known."""
        entry = self._entries.pop(key, None)
        self._count(entry, -1)
        self._floors.pop(key, None)
        self._ranks.pop(key, None)
        return entry is not None

    def take(self) -> TierEntry | None:
        """The one that goes first, which is no longer one that may go; None where all are pinned or taken."""
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
        """Note that one that was taken went."""
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
        # It was written for one use and read for the others. When the one before the last was is not known: of those
        # that were read, the last use stands for it.
        before = entry.used if entry.uses else 0.0
        use = Use(entry.tokens, 0, True, entry.used, entry.uses + 1, entry.used, before, floor)
        return self._policy(use, self._cost)
