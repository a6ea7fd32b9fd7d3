"""The loader: reads segments from the tiers below into slots of the pool, on background threads.

These threads do not touch the store. ``poll`` inserts the loaded segments between two steps of the engine.

A read has a deadline. A late segment is recomputed, as if no tier had it. While a read hangs, its thread gets no other
read, and the load keeps its slots until the read returns.

Loads that lie wholly in the host tier have a reader of their own, so that they wait for no disk. They arrive layer by
layer and may be read before the last layer is resident. Another thread asks the tiers that other
processes fill whether they have a segment (``seek``).

A layer of an arrival is copied to the pool once its checksum holds. A reader waits only for that layer, and the device
for its copy (``wait``). The store lists the segment only when all layers are resident. Until then only the requests
that know of the arrival read it, in slots that they share. If a layer is damaged or late, the arrival fails
(``failed``). The requests then drop the results that they computed with it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Condition

from inlay.errors import CapacityError
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.record import SegmentRecord, SlabMemory
from inlay.kv.offload.saver import Saver
from inlay.kv.offload.stack import EVICTED, LATE, TierStack
from inlay.kv.offload.tier import Miss, TierMissError
from inlay.kv.policies import Use
from inlay.kv.pool import Hold, Origin, PrefixMatch, Segment, SegmentRange
from inlay.slots import SlotRange, cut, total


class Arrival:
    """One segment that is loading.

    Args:
        done: the number of its tokens that are resident already.
        slots: for the other tokens.
        deadline: the end of the wait, on the clock of ``time.monotonic``.

    Attributes:
        stored: the other tokens, for readers that share the slots. This segment is not in the index.
    """

    def __init__(
        self, spec: SegmentSpec, done: int, slots: tuple[SlotRange, ...], keys: KeyMaker, deadline: float
    ) -> None:
        self.spec = spec
        self.done = done
        self.slots = slots
        rest = spec.rest(done)
        # one read, by the computation that made it
        use = Use(len(rest.ids), rest.before.tokens, module=True, frequency=1)
        self.stored = SegmentRange(Segment(rest, b"", slots, keys, use), 0, total(slots))
        self.failed = False
        self._deadline = deadline
        self._seen: list[Callable[[], None]] = []  # per layer: makes it visible to the computation
        self._news = Condition()

    @property
    def begun(self) -> bool:
        """True if its first layer is resident or queued on the device."""
        return bool(self._seen) and not self.failed

    @property
    def late(self) -> bool:
        """True if the arrival has failed or its deadline is over."""
        return self.failed or time.monotonic() > self._deadline

    def put(self, seen: Callable[[], None]) -> None:
        """Record that the next layer is being copied.

        Args:
            seen: makes the layer visible to the computation; see KVStorage.put_slab.
        """
        with self._news:
            self._seen.append(seen)
            self._news.notify_all()

    def fail(self) -> None:
        """Record that no further layer comes."""
        with self._news:
            self.failed = True
            self._news.notify_all()

    def wait(self, layer: int) -> None:
        """Make a layer visible to the next computation. Returns at once if the arrival has failed or is late."""
        with self._news:
            left_s = self._deadline - time.monotonic()
            if not self._news.wait_for(lambda: self.failed or len(self._seen) > layer, max(0.0, left_s)):
                self.failed = True
            if self.failed:
                return
            seen = self._seen[layer]
        seen()


def bring_by_layer(
    arrivals: Sequence[Arrival],
    source: HostTier,
    memory: SlabMemory,
    record_of: Callable[[SegmentSpec], SegmentRecord],
    *,
    begun: Callable[[], None],
) -> tuple[list[Arrival], list[tuple[Arrival, Miss]]]:
    """Load segments, one layer of all of them before the next layer.

    Args:
        begun: called when the first layers are on their way.

    Returns:
        The arrivals that are wholly resident, and those that failed, each with the reason.
    """
    left = {each: _layers(each, source, memory, record_of(each.spec)) for each in arrivals}
    there: list[Arrival] = []
    missed: list[tuple[Arrival, Miss]] = []
    try:
        with memory.beside():
            for layer in range(len(memory.layers)):
                for each, layers in list(left.items()):
                    try:
                        next(layers)
                    except TierMissError as miss:
                        del left[each]
                        each.fail()
                        missed.append((each, miss.reason))
                if not layer:
                    begun()
        there = list(left)
    finally:
        for each, layers in left.items():  # the copies have ended, so their sources may be released
            if each in there:
                next(layers, None)
            else:
                layers.close()
                each.fail()
    return there, missed


def _layers(
    arrival: Arrival, source: HostTier, memory: SlabMemory, asked: SegmentRecord
) -> Generator[None, None, None]:
    """Copy the layers of one segment, one per step."""
    with source.reading(asked) as slab_of:
        for layer in range(len(memory.layers)):
            slab = slab_of(layer)
            if arrival.late:
                raise TierMissError(Miss.LATE)
            arrival.put(memory.put_slab(layer, arrival.slots, slab[:, :, arrival.done :]))
            yield


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
        near: True if all of them are in the host tier.
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
        saver: promotes segments that were read from a far tier.
        timeout_s: the longest time a read may take, in seconds.

    Attributes:
        loaded: the loaded tokens, by tier.
    """

    def __init__(self, stack: TierStack, saver: Saver, timeout_s: float) -> None:
        self.loaded: dict[str, int] = {}
        self._stack = stack
        self._store = stack.store
        self._saver = saver
        self._timeout_s = timeout_s
        self._version: object = None  # replaced on progress
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
        """True if a load of this segment may start now: none failed lately, and its reader's thread is not stuck."""
        if key in self._by_key and self._by_key[key].late:  # its load hangs
            return False
        near = self._stack.is_in_host(key)
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
        return self._came_from.get(key) if self.arriving(key) is None else HostTier.name

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
            self._stack.threads.reader.post(self._refresh)

    # With the engine lock held

    def seek(self, specs: Sequence[SegmentSpec]) -> bool:
        """See Residency.seek."""
        new = [spec for spec in specs if spec.key not in self._sought]
        if new:
            until = time.monotonic() + min(SEEK_S, self._timeout_s)
            self._sought.update((spec.key, until) for spec in new)
            self._seeks[new[0].key] = until
            self._stack.threads.seeker.post(partial(self._seek, new))
        return self.seeking(spec.key for spec in specs)

    def seeking(self, keys: Iterable[bytes]) -> bool:
        """True if the caller should wait for the tiers' answer about any of these."""
        now = time.monotonic()
        return any(now < self._sought.get(key, 0.0) for key in list(keys))

    def bring_up(self, wanted: Iterable[tuple[SegmentSpec, PrefixMatch]]) -> Coming:
        """See Residency.bring_up. LATER and FREEING hold only if a move in progress will free slots."""
        missing = [(spec, found) for spec, found in wanted if spec.key not in self._by_key]
        if not missing:
            return Coming.ON_ITS_WAY
        pool = self._store.pool
        tokens = sum(len(spec.ids) - found.tokens for spec, found in missing)
        busy = sum(total(load.slots) for load in self._loads)
        if self._loads and busy + tokens > pool.slots * _LOADING_SHARE:
            return Coming.LATER
        hold = self._store.hold(*(found for _, found in missing))
        try:
            slots = self._store.allocate(tokens)
        except CapacityError:
            hold.release()
            return Coming.FREEING
        self._start(missing, slots, hold)
        return Coming.ON_ITS_WAY

    def forget(self, key: bytes) -> None:
        """Discard a loading segment on arrival."""
        if key in self._by_key:
            self._by_key[key].unwanted.add(key)

    def forget_host(self) -> None:
        """Discard all loading segments of the host tier on arrival."""
        for load in self._loads:
            load.unwanted.update(each.spec.key for each in load.wanted if self._stack.is_in_host(each.spec.key))

    def poll(self) -> list[tuple[SegmentSpec, float | None]]:
        """See Residency.poll."""
        return [loaded for load in [load for load in self._loads if load.over] for loaded in self._arrive(load)]

    def _start(self, missing: list[tuple[SegmentSpec, PrefixMatch]], slots: tuple[SlotRange, ...], hold: Hold) -> None:
        near = all(self._stack.is_in_host(spec.key) for spec, _ in missing)
        load = _Load([], slots, hold, time.monotonic() + self._timeout_s, near)
        at = 0
        for spec, found in missing:
            left = len(spec.ids) - found.tokens
            load.wanted.append(_Wanted(spec, found.tokens, found.slots, cut(slots, at, left)))
            self._by_key[spec.key] = load
            if near:
                arrival = Arrival(spec, found.tokens, load.wanted[-1].slots, self._store.keys, load.deadline)
                load.arrivals[spec.key] = arrival
            at += left
        self._loads.append(load)
        threads = self._stack.threads
        (threads.host_reader if near else threads.reader).post(lambda: self._read(load))

    def _arrive(self, load: _Load) -> list[tuple[SegmentSpec, float | None]]:
        self._version = object()
        self._loads.remove(load)
        for each in load.wanted:
            del self._by_key[each.spec.key]
        try:
            return self._give(load)
        finally:
            load.hold.release()
            self._store.pool.free(load.slots)

    def _give(self, load: _Load) -> list[tuple[SegmentSpec, float | None]]:
        """Insert the loaded segments of a load, and record the others as failed. Returns the inserted segments."""
        given = []
        for each in load.wanted:
            key = each.spec.key
            if key in load.arrived and key not in load.unwanted:
                slots = each.before + each.slots
                if not each.spec.text:
                    self._store.insert(each.spec, slots, returns=True)
                else:
                    prefix = each.spec.prefix(len(each.spec.ids))
                    self._store.insert(prefix, slots, returns=True, origin=Origin("", frozenset(each.spec.labels)))
                self._give_state(each.spec, load.states.get(key))
                self._remember(key, load.arrived[key])
            if self._store.get(each.spec) is not None:
                self._stack.misses.stored(each.spec)
                given.append((each.spec, load.left_s.get(key)))
            else:  # another try at once would most likely fail
                self._not_again[key] = time.monotonic() + AGAIN_S
        if len(self._not_again) > _MOST_REFUSED:
            now = time.monotonic()
            self._not_again = {key: until for key, until in self._not_again.items() if now < until}
        return given

    def _give_state(self, spec: SegmentSpec, data: Slab | None) -> None:
        """Store the state behind a loaded segment, unless running requests use all slots."""
        if data is None or self._stack.states is None or self._store.states is None:
            return
        slot = self._store.states.allocate()
        if slot is not None:
            self._stack.states.write(slot, data)
            self._store.keep_state(spec, len(spec.ids), slot)

    def _remember(self, key: bytes, tier: str) -> None:
        self._came_from[key] = tier
        self._came_from.move_to_end(key)
        if len(self._came_from) > _REMEMBERED:
            self._came_from.popitem(last=False)

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
            for tier in self._stack.tiers:
                tier.find(keys)
        except TierMissError as miss:
            for spec in specs:
                self._stack.misses.failed(spec, miss.reason.value)
        finally:
            for key in keys:
                self._sought.pop(key, None)
            self._seeks.pop(keys[0], None)
            self._tell()

    def _read_by_layer(self, load: _Load) -> None:
        """Read segments from the host tier. Another tier may deliver those that fail."""
        host = self._stack.host
        assert host is not None, "others give segments one by one"
        arrivals = list(load.arrivals.values())
        there, missed = bring_by_layer(arrivals, host, self._stack.memory, self._stack.record, begun=self._tell)
        for each, reason in missed:
            self._stack.misses.failed(each.spec, _said(reason))
        for each in there:
            load.arrived[each.spec.key] = host.name
            self._count(host.name, each.stored.tokens)

    def _count(self, tier: str, tokens: int) -> None:
        with self._counting:
            self.loaded[tier] = self.loaded.get(tier, 0) + tokens

    def _read_one(self, wanted: _Wanted, load: _Load) -> str | None:
        """Read from the nearest tier that delivers. Nearer tiers get a copy. Returns the tier's name, or None."""
        stack = self._stack
        record = stack.record(wanted.spec)
        asked = wanted.spec.key in load.arrivals  # the host tier has reported why it failed
        for tier in stack.tiers:
            nearer = stack.nearer(tier)
            copies: list[Slab] = []

            def take(layer: int, slab: Slab, copies: list[Slab] = copies, copy: bool = bool(nearer)) -> None:
                if layer == stack.layers:
                    load.states[record.key] = slab.copy()
                else:
                    stack.memory.write_slab(layer, wanted.slots, slab[:, :, wanted.done :])
                if copy:
                    copies.append(slab.copy())

            if load.late or not tier.holds(record.key):
                continue
            asked = True
            try:
                tier.get(record, take, lambda: load.late)
            except TierMissError as miss:
                stack.misses.failed(wanted.spec, _said(miss.reason))
                continue
            self._count(tier.name, total(wanted.slots))
            if (left_s := tier.left_s(record.key)) is not None:
                load.left_s[record.key] = left_s
            if nearer:
                self._saver.promote(record, copies, tier)
            return tier.name
        if not asked:  # the segment or the tier has gone since the request
            away = any(not tier.stats().up for tier in stack.tiers)
            stack.misses.failed(wanted.spec, LATE if load.late else Miss.FAILED.value if away else EVICTED)
        return None

    def _tell(self) -> None:
        self._version = object()
        self._stack.tell()

    def _refresh(self) -> None:
        try:
            for tier in self._stack.tiers:
                tier.refresh()
        finally:
            self._refreshing = False


def _said(reason: Miss) -> str:
    return EVICTED if reason is Miss.ABSENT else reason.value
