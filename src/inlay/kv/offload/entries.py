"""The entries of a tier, in the order of eviction of the pool's policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from inlay.kv.eviction_queue import EvictionQueue
from inlay.kv.offload.tier import TierEntry
from inlay.kv.policies import PassCost, Policy, Use


@dataclass(eq=False, slots=True)
class _Item:
    """An entry as the eviction queue sees it. Pinned and taken entries are not listed."""

    entry: TierEntry
    use: Use
    listed: int | None = None


class TierEntries(Mapping[bytes, TierEntry]):
    """The entries of one tier by key, and an eviction queue of those that are not pinned. Not thread-safe.

    Entries count uses of all processes since the first one. The floor at the last use is known of this process only.
    Entries from before its start count as older.

    Attributes:
        evictable_bytes: the size of all entries that are not pinned.
    """

    def __init__(self, policy: Policy, cost: PassCost | None = None) -> None:
        self.evictable_bytes = 0
        self._queue: EvictionQueue[_Item] = EvictionQueue(policy, cost or PassCost())
        self._items: dict[bytes, _Item] = {}

    def __getitem__(self, key: bytes) -> TierEntry:
        return self._items[key].entry

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def begin(self, entries: Iterable[TierEntry]) -> None:
        """Add entries that were there before this process started."""
        for entry in entries:
            self._note(entry, 0.0)

    def replace(self, entries: Iterable[TierEntry]) -> None:
        """Replace all entries."""
        now = {entry.key: entry for entry in entries}
        self.change({key: now.get(key) for key in self._items.keys() | now.keys()})

    def change(self, changed: Mapping[bytes, TierEntry | None]) -> None:
        """Set or remove the entries of these keys. None removes."""
        for key, entry in changed.items():
            if entry is None:
                self.remove(key)
            elif self.get(key) != entry:
                self.note(entry)

    def note(self, entry: TierEntry) -> None:
        """Add or update an entry, and list it for eviction unless it is pinned."""
        self._note(entry, self._queue.floor)

    def remove(self, key: bytes) -> bool:
        """Remove an entry. Returns True if it was known."""
        item = self._items.pop(key, None)
        if item is None:
            return False
        self._count(item, -1)
        if item.listed is not None:
            self._queue.remove(item)
        return True

    def take(self) -> TierEntry | None:
        """Return the first entry of the queue, and list it no more. Returns None if all are pinned or taken."""
        with self._queue.next() as items:
            first = next(items, None)
        if first is None:
            return None
        self._queue.remove(first)
        return first.entry

    def evicted(self, entry: TierEntry) -> None:
        """Record that an entry from ``take`` is evicted. Call it before ``remove``."""
        item = self._items.get(entry.key)
        if item is not None:
            self._queue.evicted(item)

    def _note(self, entry: TierEntry, floor: float) -> None:
        item = self._items.get(entry.key)
        if item is None:
            item = self._items[entry.key] = _Item(entry, _use(entry, floor))
        else:
            self._count(item, -1)
            item.use = _use(entry, item.use.floor if item.entry.used == entry.used else floor)
            item.entry = entry
        self._count(item, 1)
        if not entry.pinned:
            self._queue.put(item)
        elif item.listed is not None:
            self._queue.remove(item)

    def _count(self, item: _Item, sign: int) -> None:
        if not item.entry.pinned:
            self.evictable_bytes += sign * item.entry.size


def _use(entry: TierEntry, floor: float) -> Use:
    # The first use wrote the entry, the others read it. The time of the last use but one is unknown. For entries that
    # were read, the last use stands in for it.
    before = entry.used if entry.uses else 0.0
    return Use(entry.tokens, 0, True, entry.used, entry.uses + 1, entry.used, before, floor)
