"""What comes up: segments are read from the tiers below into slots of the pool, on a thread of their own.

The store is not touched on that thread: what has come up is given to it between two steps of the engine (``poll``). A
read has a deadline. What is late is computed, as if the tier had had nothing, and while a reader hangs nobody else is
sent to it; its slots are its own until it returns. What is wholly in the memory of the host has a reader of its own,
so that it waits for no disk, and comes up layer by layer, which may be read before it is there (arrivals.py). Whether a
tier that others fill has a segment is asked on another thread (``seek``).
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
from inlay.kv.offload.record import SegmentRecord, SlabMemory
from inlay.kv.offload.tier import Miss, Tier, TierMissError
from inlay.kv.offload.worker import Worker
from inlay.kv.segment import Hold, PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange, cut, total

#: The part of the pool that loads may take at the same time; a single one may take more.
_LOADING_SHARE = 1 / 2
SEEK_S = 2.0  # until a tier has said what it has
AGAIN_S = 30.0  # before what did not come up is asked for again
_MOST_REFUSED = 4096  # of those, before the ones whose time is over are looked for
_REMEMBERED = 16_384  # segments of which it is known which tier they came from


class Coming(Enum):
    """What becomes of segments that are asked for."""

    ON_ITS_WAY = "on its way"
    LATER = "later"  # as many are on their way as may be at once
    FREEING = "freeing"  # there is no room, but what is on its way between the tiers gives some back before long
    NOT = "not"  # there is no room


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A segment that is read from below. done: how many of its tokens the pool has already. slots: for the others."""

    spec: SegmentSpec
    done: int
    before: tuple[SlotRange, ...]
    slots: tuple[SlotRange, ...]


@dataclass(eq=False, slots=True)
class _Load:
    """Segments that are read together.

    arrivals: by key, where they come from the host tier. arrived: the tiers that gave those that are there, by key,
    once ``over``.
    near: whether all of them are in the tiers that are not written behind the computation.
    left_s: for how long more those are to be found that have a lifetime. unwanted: those that were to be forgotten
    meanwhile.
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
    over: bool = False

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


class Loader:
    """Brings segments of one store up from the tiers below it, nearest first.

    record_of: what is compared of a segment when it is read. timeout_s: how long a read may take.
    promote: told of a segment that came from the tier of that number, with its slabs, which those before it lack.
    nearest: the number of the first tier that is to hear of that; those before it are read by a thread of their own.
    host: the one of these that gives segments layer by layer; None where there is none.
    tell: told, on any thread, that something has come further.
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
    ) -> None:
        self.loaded: dict[str, int] = {}  # tokens that came up, by tier
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
        self._version: object = None  # another one for all that has come further
        self._timeout_s = timeout_s
        self._reader, self._near_reader = Worker("inlay-reader"), Worker("inlay-host-reader")
        self._seeker = Worker("inlay-seeker")
        self._counting = threading.Lock()  # of what two readers have loaded
        self._sought: dict[bytes, float] = {}  # keys that tiers are asked for, until when it is waited for that
        self._seeks: dict[bytes, float] = {}  # the same of each time that tiers are asked, by the first of its keys
        self._came_from: OrderedDict[bytes, str] = OrderedDict()  # the tier, by key
        self._loads: list[_Load] = []
        self._by_key: dict[bytes, _Load] = {}
        self._not_again: dict[bytes, float] = {}  # what did not come up, and until when it is not asked for
        self._refreshing = False

    @property
    def moving(self) -> bool:
        """Whether anything is on its way up, or is sought, that can be waited for."""
        return any(not load.late for load in self._loads) or self.seeking(self._sought)

    @property
    def holding(self) -> bool:
        """Whether reads hold room in the pool, also those that are late."""
        return bool(self._loads)

    @property
    def version(self) -> object:
        """Another value whenever something has come up, or was found, or is late."""
        now = time.monotonic()
        late = sum(load.late for load in self._loads), sum(until <= now for until in list(self._seeks.values()))
        return self._version, *late

    def may_read(self, key: bytes) -> bool:
        """Whether a segment may be asked for now, wherever it is."""
        if key in self._by_key and self._by_key[key].late:  # together with what hangs, whichever reader that has
            return False
        near = self._is_near(key)
        if any(load.late and load.near == near for load in self._loads):
            return False
        return time.monotonic() >= self._not_again.get(key, 0.0)

    def try_again(self, key: bytes) -> None:
        """Let a segment be asked for that did not come up before."""
        self._not_again.pop(key, None)

    def is_coming(self, key: bytes) -> bool:
        """Whether a segment is on its way up: its slots are taken, whether or not it is still wanted."""
        return key in self._by_key

    def will_arrive(self, key: bytes) -> bool:
        """Whether a segment is on its way up, and has not been forgotten meanwhile."""
        return key in self._by_key and key not in self._by_key[key].unwanted

    def is_sought(self, key: bytes) -> bool:
        """Whether tiers are being asked for a segment."""
        return key in self._sought

    def came_from(self, key: bytes) -> str | None:
        """The tier that a segment came up from when it last did, or does now, as far as that is remembered."""
        return self._came_from.get(key) if self.arriving(key) is None else self._tiers[0].name

    def arriving(self, key: bytes) -> Arrival | None:
        """A segment of the host tier's whose first layer is on its way up, or there; None for any other."""
        arrival = self._by_key[key].arrivals.get(key) if key in self._by_key else None
        return arrival if arrival is not None and arrival.begun else None

    def refresh(self) -> None:
        """Have the tiers take note of what others have put there and removed, once at a time."""
        if not self._refreshing:
            self._refreshing = True
            self._reader.submit(self._refresh)

    # On the engine's turn

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
        """Whether it is waited for what tiers say of any of these."""
        now = time.monotonic()
        return any(now < self._sought.get(key, 0.0) for key in list(keys))

    def bring_up(self, wanted: Iterable[tuple[SegmentSpec, PrefixMatch]], moving: Callable[[], bool]) -> Coming:
        """See Residency.bring_up. moving: whether what is on its way will give back room."""
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
        """Let a segment that is on its way up not arrive."""
        if key in self._by_key:
            self._by_key[key].unwanted.add(key)

    def forget_host(self) -> None:
        """Let nothing arrive that is on its way up from the host tier."""
        for load in self._loads:
            load.unwanted.update(each.spec.key for each in load.wanted if self._is_near(each.spec.key))

    def poll(self) -> None:
        """Give the store what has come up."""
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
        """Give the store what has come up of a load, and note what has not."""
        for each in load.wanted:
            key = each.spec.key
            if key in load.arrived and key not in load.unwanted:
                self._store.insert(each.spec, each.before + each.slots, returns=True)
                self._remember(key, load.arrived[key])
            if self._store.get(each.spec) is not None:
                self._misses.stored(each.spec)
                self.arrived(each.spec, load.left_s.get(key))
            else:  # to ask for it again at once would be of no use
                self._not_again[key] = time.monotonic() + AGAIN_S
        if len(self._not_again) > _MOST_REFUSED:
            now = time.monotonic()
            self._not_again = {key: until for key, until in self._not_again.items() if now < until}

    def _remember(self, key: bytes, tier: str) -> None:
        self._came_from[key] = tier
        self._came_from.move_to_end(key)
        if len(self._came_from) > _REMEMBERED:
            self._came_from.popitem(last=False)

    def close(self, timeout: float) -> bool:
        """End the threads behind what they are at; returns whether they have ended by then."""
        ended = [worker.close(timeout) for worker in (self._seeker, self._near_reader, self._reader)]
        return all(ended)

    # On threads of their own

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
        """Read what the host tier has; what it does not give, another tier may."""
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
        """Read from the nearest tier that gives it, whose name is returned; those that are nearer still get a copy."""
        record = self._record_of(wanted.spec)
        asked = wanted.spec.key in load.arrivals  # the host tier has said why it does not give it
        for number, tier in enumerate(self._tiers):
            copies: list[Slab] = []

            def take(layer: int, slab: Slab, copies: list[Slab] = copies, copy: bool = number > self._nearest) -> None:
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
        if not asked:  # it has gone since it was wanted, or the tier has
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
    """Nobody wants to hear of it."""
