"""The replicas that hold each key, as a router knows them: keys of 8 bytes, one bit for each replica.

The map is built from the changes that replicas report (kv/changes.py), each with its own numbering, and from the
router's own history. The pieces of a request count as held by the replica that it was sent to, until that replica
could have reported them. When a replica goes or restarts, its bit is given up at once. Its old bits are cleared in
small steps, so that no call takes long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from inlay.errors import ParameterError
from inlay.kv.changes import StoreChanges

_SWEPT = 512  # keys that one call clears of the bits of lost replicas
_KEY_BYTES = 128  # bytes of one key: a dict entry and two numbers, the second with one bit for each replica
_REPLICAS_A_BYTE = 6
_DROPPED = 64  # keys that are dropped at a time if there are too many

Clock = Callable[[], float]


@dataclass(slots=True)
class _ReplicaState:
    """The state of one replica. slot: its bit. epoch, number: of its store, and of its last reported change."""

    slot: int
    epoch: int = 0
    number: int = 0
    below: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Sweep:
    """Bits that are being cleared, and the keys that may still have them."""

    slots: int
    keys: Iterator[int] = field(default_factory=lambda: iter(()))


class ResidencyMap:
    """Keys and the replicas that hold them. Not thread-safe.

    Args:
        max_bytes: Approximate limit of the memory. The oldest keys are dropped beyond it.
        history_s: Seconds that the keys of a sent request count as held, before the replica reports them.
    """

    def __init__(self, *, max_bytes: int = 2**30, history_s: float = 5.0, clock: Clock = time.monotonic) -> None:
        if max_bytes < 2**20:
            raise ParameterError(
                f"the router's memory is {max_bytes} bytes; give it at least 1 MiB", code="parameter.out_of_range"
            )
        self._max_bytes = max_bytes
        self.dropped = 0  # keys that were dropped for lack of memory
        self.version = 0  # increases whenever a replica joins, leaves or changes its slot
        self._history_s = history_s
        self._clock = clock
        self._masks: dict[int, int] = {}  # key → bits of the replicas that reported it
        self._below: dict[int, int] = {}  # the same for tiers below the pool
        self._recent: dict[int, int] = {}  # the same for the router's own history
        self._ends: deque[tuple[float, int, int]] = deque()  # (end time, key, bits) of the history
        self._known: dict[str, _ReplicaState] = {}
        self._names: list[str | None] = []  # by slot
        self._alive = 0
        self._sweep: _Sweep | None = None
        self._to_sweep = 0

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def most_keys(self) -> int:
        """The largest number of keys."""
        return self._max_bytes // (_KEY_BYTES + self.slots // _REPLICAS_A_BYTE)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._known)

    @property
    def slots(self) -> int:
        """The number of bits of a mask."""
        return len(self._names)

    def slot(self, replica: str) -> int:
        """Return the bit of a replica that has joined."""
        return self._known[replica].slot

    def join(self, replica: str) -> None:
        """Add a replica without keys. A known replica stays unchanged."""
        if replica not in self._known:
            self._known[replica] = _ReplicaState(self._take_slot(replica))

    def forget(self, replica: str) -> None:
        """Remove a replica and all its keys."""
        known = self._known.pop(replica, None)
        if known is not None:
            self._give_up(known.slot)

    def heard(self, replica: str) -> tuple[int, int]:
        """Return the epoch and number of the last known change. The replica is asked for the changes since."""
        known = self._known[replica]
        return known.epoch, known.number

    def apply(self, replica: str, changes: StoreChanges) -> bool:
        """Apply the changes of a replica. Returns False if earlier changes are missing: ask for all then."""
        known = self._known.get(replica)
        if known is None:
            return True  # it has gone
        if changes.whole:
            if known.epoch or known.number:  # else nothing known could be wrong
                self._give_up(known.slot)
                known = self._known[replica] = _ReplicaState(self._take_slot(replica))
        elif changes.epoch != known.epoch or changes.first != known.number:
            known.epoch = 0
            return False
        bit = 1 << known.slot
        _set(self._masks, changes.added, bit)
        _clear(self._masks, changes.removed, bit)
        _clear(self._recent, changes.removed, bit)
        if changes.below is not None:
            below = frozenset(changes.below)
            _set(self._below, below - known.below, bit)
            _clear(self._below, known.below - below, bit)
            known.below = below
        known.epoch, known.number = changes.epoch, changes.last
        self._bound()
        return True

    def note(self, replica: str, keys: Iterable[int]) -> None:
        """Record that a request with these keys was sent to a replica."""
        known = self._known.get(replica)
        if known is None:
            return
        bit, end = 1 << known.slot, self._clock() + self._history_s
        for key in keys:
            recent = self._recent.get(key, 0)
            if not (recent | self._masks.get(key, 0)) & bit:
                self._recent[key] = recent | bit
                self._ends.append((end, key, bit))
        while len(self._ends) > self.most_keys // 4:
            self._end_first()

    def masks(self, keys: Sequence[int]) -> list[int]:
        """Return for each key the mask of the replicas with the key in their pools."""
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            self._end_first()
        self._clear_some()
        masks, recent, alive = self._masks, self._recent, self._alive
        return [(masks.get(key, 0) | recent.get(key, 0)) & alive for key in keys]

    def masks_below(self, keys: Sequence[int]) -> list[int]:
        """Return for each key the mask of the replicas with the key in their own lower tiers."""
        below, alive = self._below, self._alive
        return [below.get(key, 0) & alive for key in keys]

    def tidy(self) -> bool:
        """Do one step of clearing. Returns True if there is more to clear."""
        self._clear_some()
        return self._sweep is not None or bool(self._to_sweep)

    def _take_slot(self, replica: str) -> int:
        busy = self._to_sweep | (self._sweep.slots if self._sweep else 0)
        for slot, name in enumerate(self._names):
            if name is None and not busy >> slot & 1:
                break
        else:
            slot = len(self._names)
            self._names.append(None)
        self._names[slot] = replica
        self._alive |= 1 << slot
        self.version += 1
        return slot

    def _give_up(self, slot: int) -> None:
        self._names[slot] = None
        self._alive &= ~(1 << slot)
        self.version += 1
        self._to_sweep |= 1 << slot

    def _clear_some(self) -> None:
        """Clear the bits of lost replicas for a few more keys."""
        sweep = self._sweep
        if sweep is None:
            if not self._to_sweep:
                return
            keys = [*self._masks, *self._below, *self._recent]
            sweep = self._sweep = _Sweep(self._to_sweep, iter(keys))
            self._to_sweep = 0
        some = list(islice(sweep.keys, _SWEPT))
        for table in (self._masks, self._below, self._recent):
            _clear(table, some, sweep.slots)
        if len(some) < _SWEPT:
            self._sweep = None

    def _end_first(self) -> None:
        _, key, bit = self._ends.popleft()
        _clear(self._recent, (key,), bit)

    def _bound(self) -> None:
        """Drop the oldest keys if there are too many."""
        for table in (self._masks, self._below):
            while len(table) > self.most_keys:
                for key in list(islice(table, _DROPPED)):
                    del table[key]
                self.dropped += _DROPPED


def _set(table: dict[int, int], keys: Iterable[int], bits: int) -> None:
    for key in keys:
        table[key] = table.get(key, 0) | bits


def _clear(table: dict[int, int], keys: Iterable[int], bits: int) -> None:
    for key in keys:
        mask = table.get(key)
        if mask is not None and mask & bits:
            if mask & ~bits:
                table[key] = mask & ~bits
            else:
                del table[key]
