"""The loader: reads segments from the tiers below into slots of the pool, on background threads.

These threads do not touch the store. ``poll`` inserts the loaded segments between two steps of the engine.

A read has a deadline. A late segment is recomputed, as if no tier had it. While a reader hangs, it gets no other read,
and the load keeps its slots until the read returns.

Loads that lie wholly in the host tier have a reader of their own, so that they wait for no disk. They arrive layer by
layer and may be read before the last layer is resident (arrivals.py). Another thread asks the tiers that other
processes fill whether they have a segment (``seek``).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from inlay.errors import CapacityError
from inlay.kv.identity import SegmentSpec
from inlay.kv.misses import EVICTED, LATE, MissReasons
from inlay.kv.offload.arrivals import Arrival, bring_by_layer
from inlay.kv.offload.codecs.codec import Slab
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.record import SegmentRecord, SlabMemory, StateMemory
from inlay.kv.offload.tier import Miss, Tier, TierMissError
from inlay.kv.offload.worker import Worker
from inlay.kv.segment import Hold, Origin, PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange, cut, total

#: The share of the pool that loads may take at the same time. A single load may take more.
_LOADING_SHARE = 1 / 2
SEEK_S = 2.0  # the longest wait for the answer to a search
AGAIN_S = 30.0  # before a segment that failed to load is asked for again
_MOST_REFUSED = 4096  # failed keys before expired ones are dropped
_REMEMBERED = 16_384  # segments whose source tier is remembered


class Coming(Enum):
    """The state of segments after a request to load them."""

    ON_ITS_WAY = "on its way"
    LATER = "later"  # too many loads are in progress
    FREEING = "freeing"  # no room yet, but loads or copies in progress will free some
    NOT = "not"  # no room


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A segment to load.

    Attributes:
        done: the number of its first tokens that are in the pool already.
        before: the slots of these tokens.
        slots: for the other tokens.
    """

    spec: SegmentSpec
    done: int
    before: tuple[SlotRange, ...]
    slots: tuple[SlotRange, ...]


@dataclass(eq=False, slots=True)
class _Load:
    """Segments that are read together.

    Attributes:
        near: True if all of them are in the tiers before ``Loader.nearest``.
        arrivals: by key, if they come from the host tier.
        arrived: by key, the tier that each loaded segment came from. Complete once ``over``.
        left_s: by key, the remaining lifetime in seconds, for segments that have one.
        unwanted: keys to be forgotten on arrival.
        states: by key, the bytes of the recurrent state behind a loaded segment.
    """

    wanted: list[_Wanted]
    slots: tuple[SlotRange, ...]
    hold: Hold
    deadline: float
    near: bool
    arrivals: dict[bytes, Arrival] = field(default_factory=dict)
    arrived: dict[bytes, str] = field(default_factory=dict)
    left_s: dict[bytes, float] = field(default_factory=dict)
    unwanted: set[bytes] = field(default_factory=set)
    states: dict[bytes, Slab] = field(default_factory=dict)
    over: bool = False

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


class Loader:
    """Loads segments of one store from the tiers below it, nearest tier first.

    Args:
        record_of: the record that a stored segment must equal.
        promote: called with a loaded segment's record, its slabs and the number of its tier. Nearer tiers lack it.
        nearest: the number of the first tier that gets such copies. Tiers before it have a reader thread of their own.
        host: the tier that delivers layer by layer. None if there is none.
        tell: called on any thread after progress.
        timeout_s: the longest time a read may take, in seconds.
        states: the states of a model with recurrent layers. None without.
    """

    def __init__(
        self,
        store: SegmentStore,
        memory: SlabMemory,
        tiers: tuple[Tier, ...],
        misses: MissReasons,
        *,
        record_of: Callable[[SegmentSpec], SegmentRecord],
        promote: Callable[[SegmentRecord, list[Slab], int], None],
        nearest: int = 0,
        host: HostTier | None = None,
        tell: Callable[[], None],
        timeout_s: float,
        states: StateMemory | None = None,
    ) -> None:
        self._states = states
        self.loaded: dict[str, int] = {}  # loaded tokens, by tier
        self.arrived: Callable[[SegmentSpec, float | None], object] = _nobody
        self._store = store
        self._memory = memory
        self._tiers = tiers
        self._misses = misses
        self._record_of = record_of
        self._promote = promote
        self._nearest = nearest
        self._host = host
        self._told = tell
        self._version: object = None  # replaced on progress
        self._timeout_s = timeout_s
        self._reader, self._near_reader = Worker("inlay-reader"), Worker("inlay-host-reader")
        self._seeker = Worker("inlay-seeker")
        self._counting = threading.Lock()  # guards ``loaded``: two readers count
        self._sought: dict[bytes, float] = {}  # by key of a search in progress, the end of the wait for its answer
        self._seeks: dict[bytes, float] = {}  # the same per search, by its first key
        self._came_from: OrderedDict[bytes, str] = OrderedDict()  # the tier, by key
        self._loads: list[_Load] = []
        self._by_key: dict[bytes, _Load] = {}
        self._not_again: dict[bytes, float] = {}  # by key of a failed load, the time from which it may be tried again
        self._refreshing = False

    @property
    def moving(self) -> bool:
        """True if the caller can wait for a load or a search."""
        return any(not load.late for load in self._loads) or self.seeking(self._sought)

    @property
    def holding(self) -> bool:
        """True if a read, late or not, occupies slots of the pool."""
        return bool(self._loads)

    @property
    def version(self) -> object:
        """Changes whenever a segment has loaded, was found, or is late."""
        now = time.monotonic()
        late = sum(load.late for load in self._loads), sum(until <= now for until in list(self._seeks.values()))
        return self._version, *late

    def may_read(self, key: bytes) -> bool:
        """True if a segment may be asked for now, wherever it is."""
        if key in self._by_key and self._by_key[key].late:  # its load hangs, in whichever reader
            return False
        near = self._is_near(key)
        if any(load.late and load.near == near for load in self._loads):
            return False
        return time.monotonic() >= self._not_again.get(key, 0.0)

    def try_again(self, key: bytes) -> None:
        """Allow another load of a segment that failed to load."""
        self._not_again.pop(key, None)

    def is_coming(self, key: bytes) -> bool:
        """True if a segment is loading, wanted or not. Its slots are taken."""
        return key in self._by_key

    def will_arrive(self, key: bytes) -> bool:
        """True if a segment is loading and was not forgotten meanwhile."""
        return key in self._by_key and key not in self._by_key[key].unwanted

    def is_sought(self, key: bytes) -> bool:
        """True if tiers are being asked for a segment."""
        return key in self._sought

    def came_from(self, key: bytes) -> str | None:
        """The tier of a segment's current or last load. None if it is not remembered."""
        return self._came_from.get(key) if self.arriving(key) is None else self._tiers[0].name

    def arriving(self, key: bytes) -> Arrival | None:
        """The arrival of a segment from the host tier, once its first layer is on its way. None for any other
        segment.
        """
        arrival = self._by_key[key].arrivals.get(key) if key in self._by_key else None
        return arrival if arrival is not None and arrival.begun else None

    def refresh(self) -> None:
        """Start ``refresh`` of all tiers in the background, unless it is running."""
        if not self._refreshing:
            self._refreshing = True
            self._reader.submit(self._refresh)

    # With the engine lock held

    def seek(self, specs: Sequence[SegmentSpec]) -> bool:
        """See Residency.seek."""
        new = [spec for spec in specs if spec.key not in self._sought]
        if new:
            until = time.monotonic() + min(SEEK_S, self._timeout_s)
            self._sought.update((spec.key, until) for spec in new)
            self._seeks[new[0].key] = until
            self._seeker.submit(partial(self._seek, new))
        return self.seeking(spec.key for spec in specs)

    def seeking(self, keys: Iterable[bytes]) -> bool:
        """True if the caller should wait for the tiers' answer about any of these."""
        now = time.monotonic()
        return any(now < self._sought.get(key, 0.0) for key in list(keys))

    def bring_up(self, wanted: Iterable[tuple[SegmentSpec, PrefixMatch]], moving: Callable[[], bool]) -> Coming:
        """See Residency.bring_up.

        Args:
            moving: returns True if loads or copies in progress will free slots.
        """
        missing = [(spec, found) for spec, found in wanted if spec.key not in self._by_key]
        if not missing:
            return Coming.ON_ITS_WAY
        pool = self._store.pool
        tokens = sum(len(spec.ids) - found.tokens for spec, found in missing)
        busy = sum(total(load.slots) for load in self._loads)
        if self._loads and busy + tokens > pool.slots * _LOADING_SHARE:
            return Coming.LATER if moving() else Coming.NOT
        hold = self._store.hold(*(found for _, found in missing))
        try:
            slots = self._store.allocate(tokens)
        except CapacityError:
            hold.release()
            return Coming.FREEING if moving() else Coming.NOT
        self._start(missing, slots, hold)
        return Coming.ON_ITS_WAY

    def forget(self, key: bytes) -> None:
        """Discard a loading segment on arrival."""
        if key in self._by_key:
            self._by_key[key].unwanted.add(key)

    def forget_host(self) -> None:
        """Discard all loading segments of the host tier on arrival."""
        for load in self._loads:
            load.unwanted.update(each.spec.key for each in load.wanted if self._is_near(each.spec.key))

    def poll(self) -> None:
        """Insert the loaded segments into the store."""
        for load in [load for load in self._loads if load.over]:
            self._arrive(load)

    def _start(self, missing: list[tuple[SegmentSpec, PrefixMatch]], slots: tuple[SlotRange, ...], hold: Hold) -> None:
        near = all(self._is_near(spec.key) for spec, _ in missing)
        load = _Load([], slots, hold, time.monotonic() + self._timeout_s, near)
        at = 0
        for spec, found in missing:
            left = len(spec.ids) - found.tokens
            load.wanted.append(_Wanted(spec, found.tokens, found.slots, cut(slots, at, left)))
            self._by_key[spec.key] = load
            if near and self._host is not None and self._host.holds(spec.key):
                arrival = Arrival(spec, found.tokens, load.wanted[-1].slots, self._store.keys, load.deadline)
                load.arrivals[spec.key] = arrival
            at += left
        self._loads.append(load)
        (self._near_reader if near else self._reader).submit(lambda: self._read(load))

    def _is_near(self, key: bytes) -> bool:
        return any(tier.holds(key) for tier in self._tiers[: self._nearest])

    def _arrive(self, load: _Load) -> None:
        self._version = object()
        self._loads.remove(load)
        for each in load.wanted:
            del self._by_key[each.spec.key]
        try:
            self._give(load)
        finally:
            load.hold.release()
            self._store.pool.free(load.slots)

    def _give(self, load: _Load) -> None:
        """Insert the loaded segments of a load, and record the others as failed."""
        for each in load.wanted:
            key = each.spec.key
            if key in load.arrived and key not in load.unwanted:
                slots = each.before + each.slots
                if self._states is None:
                    self._store.insert(each.spec, slots, returns=True)
                else:  # a prefix of prompts, which are read up to any token
                    prefix = each.spec.prefix(len(each.spec.ids))
                    self._store.insert(prefix, slots, returns=True, origin=Origin(""))
                self._give_state(each.spec, load.states.get(key))
                self._remember(key, load.arrived[key])
            if self._store.get(each.spec) is not None:
                self._misses.stored(each.spec)
                self.arrived(each.spec, load.left_s.get(key))
            else:  # another try at once would most likely fail
                self._not_again[key] = time.monotonic() + AGAIN_S
        if len(self._not_again) > _MOST_REFUSED:
            now = time.monotonic()
            self._not_again = {key: until for key, until in self._not_again.items() if now < until}

    def _give_state(self, spec: SegmentSpec, data: Slab | None) -> None:
        """Store the state behind a loaded segment, unless running requests use all slots."""
        if data is None or self._states is None or self._store.states is None:
            return
        slot = self._store.states.allocate()
        if slot is not None:
            self._states.write(slot, data)
            self._store.keep_state(spec, len(spec.ids), slot)

    def _remember(self, key: bytes, tier: str) -> None:
        self._came_from[key] = tier
        self._came_from.move_to_end(key)
        if len(self._came_from) > _REMEMBERED:
            self._came_from.popitem(last=False)

    def close(self, timeout: float) -> bool:
        """End the threads after their current jobs. Returns True if all have ended in time."""
        ended = [worker.close(timeout) for worker in (self._seeker, self._near_reader, self._reader)]
        return all(ended)

    # On background threads

    def _read(self, load: _Load) -> None:
        try:
            if load.arrivals:
                self._read_by_layer(load)
            for each in load.wanted:
                tier = load.arrived.get(each.spec.key) or self._read_one(each, load)
                if tier is not None:
                    load.arrived[each.spec.key] = tier
        finally:
            load.over = True
            self._tell()

    def _seek(self, specs: Sequence[SegmentSpec]) -> None:
        keys = [spec.key for spec in specs]
        try:
            for tier in self._tiers:
                tier.find(keys)
        except TierMissError as miss:
            for spec in specs:
                self._misses.failed(spec, miss.reason.value)
        finally:
            for key in keys:
                self._sought.pop(key, None)
            self._seeks.pop(keys[0], None)
            self._tell()

    def _read_by_layer(self, load: _Load) -> None:
        """Read segments from the host tier. Another tier may deliver those that fail."""
        assert self._host is not None, "others give segments one by one"
        there = bring_by_layer(
            list(load.arrivals.values()),
            self._host,
            self._memory,
            self._record_of,
            missed=lambda spec, reason: self._misses.failed(spec, _said(reason)),
            begun=self._tell,
        )
        for each in there:
            load.arrived[each.spec.key] = self._host.name
            self._count(self._host.name, each.stored.tokens)

    def _count(self, tier: str, tokens: int) -> None:
        with self._counting:
            self.loaded[tier] = self.loaded.get(tier, 0) + tokens

    def _read_one(self, wanted: _Wanted, load: _Load) -> str | None:
        """Read from the nearest tier that delivers. Nearer tiers get a copy. Returns the tier's name, or None."""
        record = self._record_of(wanted.spec)
        asked = wanted.spec.key in load.arrivals  # the host tier has reported why it failed
        for number, tier in enumerate(self._tiers):
            copies: list[Slab] = []

            def take(layer: int, slab: Slab, copies: list[Slab] = copies, copy: bool = number > self._nearest) -> None:
                if layer == len(self._memory.layers):
                    load.states[record.key] = slab.copy()
                else:
                    self._memory.write_slab(layer, wanted.slots, slab[:, :, wanted.done :])
                if copy:
                    copies.append(slab.copy())

            if load.late or not tier.holds(record.key):
                continue
            asked = True
            try:
                tier.get(record, take, lambda: load.late)
            except TierMissError as miss:
                self._misses.failed(wanted.spec, _said(miss.reason))
                continue
            self._count(tier.name, total(wanted.slots))
            if (left_s := tier.left_s(record.key)) is not None:
                load.left_s[record.key] = left_s
            if number > self._nearest:
                self._promote(record, copies, number)
            return tier.name
        if not asked:  # the segment or the tier has gone since the request
            away = any(not tier.stats().up for tier in self._tiers)
            self._misses.failed(wanted.spec, LATE if load.late else Miss.FAILED.value if away else EVICTED)
        return None

    def _tell(self) -> None:
        self._version = object()
        self._told()

    def _refresh(self) -> None:
        try:
            for tier in self._tiers:
                tier.refresh()
        finally:
            self._refreshing = False


def _said(reason: Miss) -> str:
    return EVICTED if reason is Miss.ABSENT else reason.value


def _nobody(spec: SegmentSpec, left_s: float | None) -> None:
    """Do nothing."""
