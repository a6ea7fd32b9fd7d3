"""The protocol of every tier below the pool, and its entries in the order of eviction."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from inlay.errors import PortableError
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.policies import EvictionQueue, PassCost, Policy, Use
from inlay.types import TierStats


class Miss(Enum):
    """Why a tier did not deliver a segment."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    LATE = "late"
    FAILED = "failed"  # an error of the operating system or server


class TierMissError(PortableError):
    """A tier could not deliver a segment. The caller tries another tier or recomputes the segment."""

    def __init__(self, reason: Miss, message: str = "") -> None:
        super().__init__(message or reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A segment in a tier.

    Attributes:
        size: bytes in the tier.
        created, used: seconds since 1970.
        uses: how often it was read.
        pinned: True if it may not be evicted.
        text … private: how it was made, from its record; see MissReasons.
        labels: see SegmentSpec.
    """

    key: bytes
    tokens: int
    size: int
    model: str
    created: float
    used: float
    uses: int = 0
    pinned: bool = False
    text: bytes = b""
    fingerprint: bytes = b""
    numerics: str = ""
    codec: str = ""
    salt: bytes = b""
    context: bytes = b""
    private: bool = False
    labels: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, record: SegmentRecord, size: int, at: float) -> TierEntry:
        """The entry of a segment that a tier received at time ``at``."""
        return cls(
            key=record.key,
            tokens=record.tokens,
            size=size,
            model=record.model,
            created=at,
            used=at,
            text=record.text,
            fingerprint=record.fingerprint,
            numerics=record.numerics,
            codec=f"{record.kv_dtype} {record.codec}",
            salt=record.salt,
            context=record.context,
            private=record.before.private,
            labels=record.labels,
        )


class Tier(Protocol):
    """Segments outside the pool.

    ``get``, ``put``, ``delete``, ``left_s``, ``find`` and ``refresh`` may block and run on background threads. All else
    never blocks. All methods are thread-safe.

    Where a method has a body, it is that of a tier that is always sure, keeps no lifetimes, has no other writers and
    keeps the labels of its records.

    Attributes:
        codec: the codec for segments from the pool. Segments from another tier keep their form.
    """

    name: str
    codec: str

    def holds(self, key: bytes) -> bool:
        """True if the segment is believed to be there. Makes no request, so it may be wrong."""
        ...

    def unsure(self, key: bytes) -> bool:
        """True if only ``find`` can tell whether the segment is there."""
        return False

    def find(self, keys: Sequence[bytes]) -> None:
        """Ask the tier which of these segments it has, for later calls of ``holds``.

        Raises TierMissError on failure.
        """
        return

    def get(self, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
        """Deliver a segment's slabs, layer by layer. Each is checked before delivery.

        Args:
            asked: the wanted record. Only a segment with an equal record is delivered.
            take: called with a layer and its slab. The slab is valid only during the call.
            late: True once the time is over.

        Raises:
            TierMissError: discard the slabs taken so far.
        """
        ...

    def put(self, record: SegmentRecord, slabs: Iterable[Slab]) -> bool:
        """Store a segment; returns True if it is stored. ``slabs``, one per layer, must not change before the
        return.
        """
        ...

    def delete(self, key: bytes) -> bool:
        """Remove a segment; returns True if it was there."""
        ...

    def expire(self, key: bytes, ttl_s: float) -> None:
        """Let a segment, which may arrive later, expire after this many seconds. The latest end of several calls
        counts.
        """
        ...

    def left_s(self, key: bytes) -> float | None:
        """Seconds until a segment expires; None for never. May block."""
        return None

    def iterate(self) -> Iterator[TierEntry]:
        """All entries, most recently used last."""
        ...

    def labelled(self, labels: Iterable[bytes]) -> list[TierEntry]:
        """The entries with any of these labels, as far as this process knows. The cost grows with their number."""
        ...

    def add_labels(self, key: bytes, labels: Iterable[bytes]) -> None:
        """Add labels to a segment, if it is there. May block."""
        return

    def stats(self) -> TierStats: ...

    @property
    def has_room(self) -> bool:
        """True if at most half of the quota is taken. Then a segment that is never read again displaces no other."""
        ...

    def refresh(self) -> None:
        """Read the changes of other processes. May block."""
        return

    def close(self) -> None:
        """Close files and connections. Stored segments stay."""
        ...


@dataclass(eq=False, slots=True)
class _Item:
    """An entry of the eviction queue. Pinned and taken entries are not listed."""

    entry: TierEntry
    use: Use
    listed: int | None = None


class TierEntries(Mapping[bytes, TierEntry]):
    """The entries of one tier by key, and an eviction queue of those that are not pinned. Not thread-safe.

    The uses of an entry are those of all processes. Only this process knows the floor at its own uses (``Use.floor``),
    so entries that it has not used count as older.

    Attributes:
        evictable_bytes: the size of all entries that are not pinned.
    """

    def __init__(self, policy: Policy, cost: PassCost | None = None) -> None:
        self.evictable_bytes = 0
        self._queue: EvictionQueue[_Item] = EvictionQueue(policy, cost or PassCost())
        self._items: dict[bytes, _Item] = {}
        self._labelled: defaultdict[bytes, set[bytes]] = defaultdict(set)  # the keys of each label

    def __getitem__(self, key: bytes) -> TierEntry:
        return self._items[key].entry

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def labelled(self, labels: Iterable[bytes]) -> list[TierEntry]:
        """The entries with any of these labels."""
        keys = {key for label in labels for key in self._labelled.get(label, ())}
        return [self._items[key].entry for key in keys]

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
        self._unlabel(item.entry)
        if item.listed is not None:
            self._queue.remove(item)
        return True

    def take(self) -> TierEntry | None:
        """Remove the first entry from the queue and return it. Returns None if all entries are pinned or taken."""
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
            self._unlabel(item.entry)
            item.use = _use(entry, item.use.floor if item.entry.used == entry.used else floor)
            item.entry = entry
        self._count(item, 1)
        for label in entry.labels:
            self._labelled[label].add(entry.key)
        if not entry.pinned:
            self._queue.put(item)
        elif item.listed is not None:
            self._queue.remove(item)

    def _unlabel(self, entry: TierEntry) -> None:
        for label in entry.labels:
            self._labelled[label].discard(entry.key)
            if not self._labelled[label]:
                del self._labelled[label]

    def _count(self, item: _Item, sign: int) -> None:
        if not item.entry.pinned:
            self.evictable_bytes += sign * item.entry.size


def _use(entry: TierEntry, floor: float) -> Use:
    # The first use wrote the entry, the others read it. The time of the last use but one is unknown. For entries that
    # were read, the last use stands in for it.
    before = entry.used if entry.uses else 0.0
    return Use(entry.tokens, 0, True, entry.used, entry.uses + 1, entry.used, before, floor)


class TierCounts:
    """Reads, writes and evictions of one tier, by the field of TierStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def add(self, **sums: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            self._sums.update(sums)

    def missed(self, reason: Miss) -> None:
        """Count a miss."""
        with self._lock:
            self._misses[reason.value] += 1

    def evicted(self, ages_s: Iterable[float]) -> None:
        """Count evicted segments. ``ages_s`` are the seconds since each was last read."""
        ages: Any = list(ages_s)
        self.add(evictions=len(ages), evicted_age_s=sum(ages))

    def stats(self, entries: Iterable[TierEntry], **more: Any) -> TierStats:
        """The counters and the current contents. ``more`` are further fields of TierStats."""
        held = list(entries)
        with self._lock:
            sums: dict[str, Any] = dict(self._sums)
            return TierStats(
                segments=len(held),
                tokens=sum(entry.tokens for entry in held),
                bytes=sum(entry.size for entry in held),
                misses=tuple(sorted(self._misses.items())),
                **sums,
                **more,
            )
