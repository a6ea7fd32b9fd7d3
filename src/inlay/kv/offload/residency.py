"""Residency: where the KV of segments lies, and how it moves between the tiers.

The store's index finds segments in the pool. This module knows which tiers below hold a segment, and which segments
are moving. A Loader moves them up. A Saver writes computed segments down, and a Demoter copies modules to the host tier
before they are evicted. Each works on threads of its own, which never touch the store: ``poll`` updates it between two
steps of the engine.

A tier may write segments through a codec. Such a segment loads as another segment, a *form* of the written one
(identity.py), and lies in the pool as such.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from inlay.kv.identity import LOSSLESS, SegmentSpec
from inlay.kv.misses import LATE, MissReasons
from inlay.kv.offload.arrivals import Arrival
from inlay.kv.offload.demotion import Demoter
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.loader import Coming, Loader
from inlay.kv.offload.record import SegmentRecord, SlabMemory, StateMemory
from inlay.kv.offload.saver import Saver
from inlay.kv.offload.tier import Tier
from inlay.kv.segment import PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.types import TierStats

#: The most tokens of segments below the pool that are remembered for listing and eviction.
_MOST_KNOWN = 4 * 2**20
_CLOSE_S = 5.0  # for the current reads and writes


class Residency:
    """The tiers below the pool of one store, nearest first. There may be none.

    Set ``wake`` to have ``poll`` called between two steps whenever it has work. Call the methods under "With the engine
    lock held" with that lock only, the others from any thread.

    Args:
        memory: of the pool.
        tiers: the tiers below the host tier.
        host: the tier that receives evicted modules. None if the pool lies in host memory itself.
        model: the model's public name.
        timeout_s: the longest time a read may take, in seconds.
        states: the states of a model with recurrent layers. None without.
    """

    def __init__(
        self,
        store: SegmentStore,
        memory: SlabMemory,
        tiers: Sequence[Tier] = (),
        *,
        host: HostTier | None = None,
        model: str = "",
        timeout_s: float = 10,
        states: StateMemory | None = None,
    ) -> None:
        self._states = states
        self.tiers = tuple(tiers) if host is None else (host, *tiers)
        self.misses = MissReasons(store.keys)
        for tier in self.tiers:
            for entry in tier.iterate():
                self.misses.listed(entry)
        #: The codecs whose forms of a segment may be read in its place, nearest first.
        self.codecs = tuple(dict.fromkeys(tier.codec for tier in self.tiers if tier.codec != LOSSLESS))
        self.wake: Callable[[], None] = _nobody
        self._store = store
        self._memory = memory
        self._model = model
        self._known: OrderedDict[bytes, SegmentSpec] = OrderedDict()  # written or read below, latest last
        self._known_tokens = 0
        self._knowing = threading.Lock()
        self._told: object = None  # replaced on progress
        self._news = threading.Event()  # set on progress of a read or write, cleared by poll
        self._arrived: Callable[[SegmentSpec, float | None], object] = _nobody_hears
        self._demoter: Demoter | None = None
        if host is not None:
            self._demoter = Demoter(store, memory, host, record_of=self._record, tell=self._tell, timeout_s=timeout_s)
        written = 0 if host is None else 1
        self._saver = Saver(
            store,
            memory,
            self.tiers,
            forms=self.forms,
            record_of=self._record,
            nearest=written,
            tell=self._tell,
            tell_waiting=self._news.set,
            states=states,
        )
        self._loader = Loader(
            store,
            memory,
            self.tiers,
            self.misses,
            record_of=self._record,
            promote=self._saver.promote,
            nearest=written,
            host=host,
            tell=self._tell,
            timeout_s=timeout_s,
            states=states,
        )
        self._loader.arrived = self._has_arrived

    def stats_of(self, name: str) -> TierStats | None:
        """The statistics of the tier with this name. None if there is none."""
        return next((tier.stats() for tier in self.tiers if tier.name == name), None)

    def add_profile(self, spec: SegmentSpec, deviations: bytes) -> None:
        """Write a segment's deviation profile beside the segment, where a disk tier holds or will hold it.

        Args:
            deviations: the numbers of all tokens, fp16.
        """
        self._saver.add_profile(spec, deviations)

    def profiles(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys of segments with the deviation profiles that disk tiers hold."""
        for tier in self.tiers:
            if isinstance(tier, DiskTier):
                yield from tier.profiles(self._store.keys.fingerprint)

    @property
    def has_room(self) -> bool:
        """True if a tier that is written in the background has room to spare; see Tier."""
        return any(tier.has_room for tier in self.tiers)

    @property
    def loaded(self) -> dict[str, int]:
        """Loaded tokens, by tier."""
        return self._loader.loaded

    @property
    def not_written(self) -> int:
        """Segments that were evicted or dropped from the queue before they were written."""
        return self._saver.not_written

    @property
    def moving(self) -> bool:
        """True if a move in progress will free slots of the pool soon, or the caller can wait for it."""
        copying = self._saver.copying or (self._demoter is not None and self._demoter.moving)
        return copying or self._loader.moving

    @property
    def holding(self) -> bool:
        """True if reads or copies, late or not, occupy slots of the pool."""
        return self._saver.copying or self._loader.holding or (self._demoter is not None and self._demoter.copying)

    @property
    def version(self) -> object:
        """Changes whenever a segment has loaded, was found, or is late."""
        return self._loader.version

    @property
    def room_version(self) -> object:
        """Changes whenever slots that a read or copy occupied may be free again."""
        return self._told, self._loader.version, self.moving

    @property
    def waiting(self) -> int:
        """The number of segments that are queued for writing or being written."""
        return self._saver.waiting

    @property
    def settled(self) -> bool:
        """True if nothing is left to write or remove."""
        return self._saver.settled

    @property
    def demoting(self) -> bool:
        """True if anything is being copied to the host tier or queued for it."""
        return self._demoter is not None and not self._demoter.settled

    @property
    def lag_s(self) -> float:
        """How long the first segment in the write queue has waited, in seconds."""
        return self._saver.lag_s

    def on_arrival(self, listener: Callable[[SegmentSpec, float | None], object]) -> None:
        """Set the listener that is called after a segment has loaded into the pool, with the engine lock held.

        Args:
            listener: gets the segment and its remaining lifetime in the tier in seconds, None for no end.
        """
        self._arrived = listener

    def below(self, key: bytes) -> bool:
        """True if the caller can wait for a segment: it is loading, or a tier is believed to have it."""
        if not self.tiers or self._saver.forgets(key) or not self._loader.may_read(key):
            return False
        # A tier that fails to deliver a segment stops holding it before its reader ends.
        if self._loader.will_arrive(key) or any(tier.holds(key) for tier in self.tiers):
            return True
        self._loader.refresh()
        return False

    def holders(self, key: bytes) -> list[str]:
        """The tiers that are believed to have a segment, nearest first. Empty if it is to be removed."""
        return [] if self._saver.forgets(key) else [tier.name for tier in self.tiers if tier.holds(key)]

    def unsure(self, key: bytes) -> bool:
        """True if a tier must be asked for a segment, or is being asked; see ``seek``."""
        return self._loader.is_sought(key) or any(tier.unsure(key) for tier in self.tiers)

    def bringing(self, keys: Iterable[bytes]) -> frozenset[bytes]:
        """The keys whose segments are loading."""
        return frozenset(filter(self._loader.is_coming, keys))

    def forms(self, spec: SegmentSpec) -> Iterator[SegmentSpec]:
        """A segment and the forms that may be read in its place, most exact first."""
        yield spec
        if spec.source is None:
            for codec in self.codecs:
                yield spec.through(codec, self._store.keys)

    def came_from(self, key: bytes) -> str | None:
        """The tier of a segment's current or last load. None if it is not remembered."""
        return self._loader.came_from(key)

    def arriving(self, key: bytes) -> Arrival | None:
        """A segment that may be read while it loads, layer by layer. None for any other segment."""
        return self._loader.arriving(key)

    def why_missing(self, spec: SegmentSpec) -> str:
        """Why a segment that is neither in the pool nor loading must be computed; see MissReasons."""
        if any(self._loader.will_arrive(form.key) or self._loader.is_sought(form.key) for form in self.forms(spec)):
            return LATE
        return self.misses.explain(spec)

    def wait(self, timeout: float) -> None:
        """Block until there is progress or the timeout in seconds is over."""
        self._news.wait(timeout)

    # With the engine lock held

    def seek(self, specs: Sequence[SegmentSpec]) -> bool:
        """Ask the tiers that are ``unsure`` of these segments. Returns True if the caller should wait."""
        return self._loader.seek(specs)

    def bring_up(self, wanted: Iterable[tuple[SegmentSpec, PrefixMatch]]) -> Coming:
        """Start to load segments into the pool. All must be ``below``.

        Args:
            wanted: each segment with its prefix match in the pool.

        Returns:
            The state of the load. Nothing was started if there is no room.
        """
        return self._loader.bring_up(wanted, lambda: self.moving)

    def computed(self, spec: SegmentSpec) -> None:
        """Record that a segment was computed and is in the pool."""
        self.misses.stored(spec)
        for form in self.forms(spec):
            self._loader.try_again(form.key)

    def save(self, spec: SegmentSpec) -> None:
        """Write a stored segment to the tiers in the background."""
        self._saver.save(spec)

    def forget(self, key: bytes) -> None:
        """Stop the segment's copies, loads and writes, and remove it from the tiers. Its forms are other segments."""
        if self._demoter is not None:
            self._demoter.forget(key)
        if self.tiers:
            self._loader.forget(key)
            self._saver.forget(key)

    def clear_host(self) -> None:
        """Clear the host tier and discard loads from it. Other tiers keep their segments."""
        if self._demoter is not None:
            self._loader.forget_host()
            self._demoter.clear()

    def expire_at(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Have the tiers remove segments after this many seconds, even if this process has ended by then."""
        if self.tiers and keys:
            self._saver.expire_at(keys, ttl_s)

    def poll(self) -> None:
        """Insert loaded segments into the store and release copied ones."""
        if not self.tiers:
            return
        self._news.clear()
        self._loader.poll()
        self._saver.poll()
        if self._demoter is not None:
            self._demoter.poll()

    def demote(self) -> None:
        """Start to copy the next victims to the host tier, if there is one. Does not wait."""
        if self._demoter is not None:
            self._demoter.look()

    # Shutdown

    def flush(self, timeout: float) -> None:
        """Wait until everything is written and removed, for at most this many seconds."""
        until = time.monotonic() + timeout
        while not self.settled and time.monotonic() < until:
            self._news.wait(0.05)
            self.wake()

    def close(self) -> None:
        """End the threads after their current jobs, and close the tiers."""
        ended = [self._loader.close(_CLOSE_S), self._saver.close(_CLOSE_S)]
        if self._demoter is not None:
            ended.append(self._demoter.close(_CLOSE_S))
        if all(ended):
            for tier in self.tiers:
                tier.close()

    def below_pool(self) -> list[SegmentSpec]:
        """The segments that this process wrote to the tiers or read from them, if a tier still has them."""
        with self._knowing:
            known = list(self._known.values())
        return [spec for spec in known if any(self.holders(form.key) for form in self.forms(spec))]

    def _record(self, spec: SegmentSpec) -> SegmentRecord:
        self._know(spec.lossless)
        state = () if self._states is None else self._states.layout
        return SegmentRecord.of(spec, self._store.keys, self._memory.layers, self._model, state)

    def _know(self, spec: SegmentSpec) -> None:
        with self._knowing:
            if self._known.pop(spec.key, None) is None:
                self._known_tokens += len(spec.ids)
            self._known[spec.key] = spec
            while self._known_tokens > _MOST_KNOWN:
                self._known_tokens -= len(self._known.popitem(last=False)[1].ids)

    def _has_arrived(self, spec: SegmentSpec, left_s: float | None) -> None:
        if self._demoter is not None:
            self._demoter.arrived(spec.key)
        self._arrived(spec, left_s)

    def _tell(self) -> None:
        self._told = object()
        self._news.set()
        self.wake()


def _nobody() -> None:
    """Do nothing."""


def _nobody_hears(spec: SegmentSpec, left_s: float | None) -> None:
    """Do nothing."""
