"""Residency: where the keys and values of segments lie, apart from what they are, and how they move.

The index of a store finds what lies in the pool. Here stands which of the tiers below hold a segment that does not,
and what is on its way: up by a Loader, down by a Saver when it is computed, and to the host tier by a Demoter when it
is evicted, each on threads of its own. None of them touches the store: that is done between two steps of the engine, by
``poll``.

A tier may write what it is given through a codec. What comes back from there is another segment, a *form* of the one
that was written (identity.py), and lies in the pool as such.
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
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.loader import Coming, Loader
from inlay.kv.offload.record import SegmentRecord, SlabMemory
from inlay.kv.offload.saver import Saver
from inlay.kv.offload.tier import Tier
from inlay.kv.segment import PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.types import TierStats

#: Tokens of segments below the pool that are remembered, so that they can be listed and evicted.
_MOST_KNOWN = 4 * 2**20
_CLOSE_S = 5.0  # for the reads and writes under way


class Residency:
    """The tiers below the pool of one store, nearest first; none is as good as any.

    host: the tier above all of these, which what the pool evicts goes to; None where the pool lies in the host's own
        memory. memory: of the pool. model: what people call the model. timeout_s: how long a read may take.

    Set ``wake`` to have ``poll`` called, between two steps, whenever there is something for it to do. What is under "On
    the engine's turn" may be called there alone, all else at any moment.
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
    ) -> None:
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
        self._known: OrderedDict[bytes, SegmentSpec] = OrderedDict()  # what was written or read below, the latest last
        self._known_tokens = 0
        self._knowing = threading.Lock()
        self._told: object = None  # another one for all that was told
        self._news = threading.Event()  # a read or a write has come further since the last poll
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
        )
        self._loader.arrived = self._has_arrived

    def stats_of(self, name: str) -> TierStats | None:
        """Of the tier of that name; None where there is none."""
        return next((tier.stats() for tier in self.tiers if tier.name == name), None)

    @property
    def has_room(self) -> bool:
        """Whether a tier that is written behind the computation has room to spare: see Tier."""
        return any(tier.has_room for tier in self.tiers)

    @property
    def loaded(self) -> dict[str, int]:
        """Tokens that came up, by tier."""
        return self._loader.loaded

    @property
    def not_written(self) -> int:
        """Segments that had gone, or were too many, before they could be written."""
        return self._saver.not_written

    @property
    def moving(self) -> bool:
        """Whether anything is on its way that gives back room in the pool before long, or is waited for."""
        copying = self._saver.copying or (self._demoter is not None and self._demoter.moving)
        return copying or self._loader.moving

    @property
    def holding(self) -> bool:
        """Whether reads or copies hold room in the pool, also those that are late and not waited for."""
        return self._saver.copying or self._loader.holding or (self._demoter is not None and self._demoter.copying)

    @property
    def version(self) -> object:
        """Another value whenever something has come up or was found, or is late."""
        return self._loader.version

    @property
    def room_version(self) -> object:
        """Another value whenever room may have come back that a read or a copy held."""
        return self._told, self._loader.version, self.moving

    @property
    def waiting(self) -> int:
        """How many segments are to be written, those included that are being written."""
        return self._saver.waiting

    @property
    def settled(self) -> bool:
        """Whether nothing is to be written or removed."""
        return self._saver.settled

    @property
    def demoting(self) -> bool:
        """Whether anything is copied to the host tier, or waits for that."""
        return self._demoter is not None and not self._demoter.settled

    @property
    def lag_s(self) -> float:
        """For how long the first of them has waited."""
        return self._saver.lag_s

    def on_arrival(self, listener: Callable[[SegmentSpec, float | None], object]) -> None:
        """Tell a listener of every segment that has come up and is in the pool now, on the engine's turn.

        With it, for how many seconds more the tier has it; None where that has no end.
        """
        self._arrived = listener

    def below(self, key: bytes) -> bool:
        """Whether a segment is on its way up, or a tier is thought to have it, and it can be waited for."""
        if not self.tiers or self._saver.forgets(key) or not self._loader.may_read(key):
            return False
        # A tier that cannot give what it is asked for knows so before the reader is done with what was asked for.
        if self._loader.will_arrive(key) or any(tier.holds(key) for tier in self.tiers):
            return True
        self._loader.refresh()
        return False

    def holders(self, key: bytes) -> list[str]:
        """The tiers that are thought to have a segment, nearest first; none where it is to be forgotten."""
        return [] if self._saver.forgets(key) else [tier.name for tier in self.tiers if tier.holds(key)]

    def unsure(self, key: bytes) -> bool:
        """Whether a tier has to be asked if it has a segment, or is being asked; see ``seek``."""
        return self._loader.is_sought(key) or any(tier.unsure(key) for tier in self.tiers)

    def bringing(self, keys: Iterable[bytes]) -> frozenset[bytes]:
        """Those of the keys whose segments are on their way up."""
        return frozenset(filter(self._loader.is_coming, keys))

    def forms(self, spec: SegmentSpec) -> Iterator[SegmentSpec]:
        """A segment and those forms of it that may be read in its place, most exact first."""
        yield spec
        if spec.source is None:
            for codec in self.codecs:
                yield spec.through(codec, self._store.keys)

    def came_from(self, key: bytes) -> str | None:
        """The tier that a segment came up from when it last did, or does now, as far as that is remembered."""
        return self._loader.came_from(key)

    def arriving(self, key: bytes) -> Arrival | None:
        """A segment that may be read while it comes up, layer by layer; None for any other."""
        return self._loader.arriving(key)

    def why_missing(self, spec: SegmentSpec) -> str:
        """Why a segment that is neither in the pool nor on its way has to be computed; see MissReasons."""
        if any(self._loader.will_arrive(form.key) or self._loader.is_sought(form.key) for form in self.forms(spec)):
            return LATE
        return self.misses.explain(spec)

    def wait(self, timeout: float) -> None:
        """Until something has come further, or the time is over."""
        self._news.wait(timeout)

    # On the engine's turn

    def seek(self, specs: Sequence[SegmentSpec]) -> bool:
        """Have the tiers that are ``unsure`` of these asked for them; returns whether to wait for that."""
        return self._loader.seek(specs)

    def bring_up(self, wanted: Iterable[tuple[SegmentSpec, PrefixMatch]]) -> Coming:
        """Have segments read into the pool, all that are ``below``, where there is room; returns what becomes of them.

        wanted: with what of each is stored.
        """
        return self._loader.bring_up(wanted, lambda: self.moving)

    def computed(self, spec: SegmentSpec) -> None:
        """Note that a segment was computed, and is in the pool."""
        self.misses.stored(spec)
        for form in self.forms(spec):
            self._loader.try_again(form.key)

    def save(self, spec: SegmentSpec) -> None:
        """Write a segment, which the store has, behind what is going on."""
        self._saver.save(spec)

    def forget(self, key: bytes) -> None:
        """Write no such segment, bring none up, and remove it from the tiers; a form of it is another segment."""
        if self._demoter is not None:
            self._demoter.forget(key)
        if self.tiers:
            self._loader.forget(key)
            self._saver.forget(key)

    def clear_host(self) -> None:
        """Forget what the host tier has, which nobody finds again; other tiers are left alone."""
        if self._demoter is not None:
            self._loader.forget_host()
            self._demoter.clear()

    def expire_at(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Have the tiers forget segments when so many seconds are over, also where this process has ended by then."""
        if self.tiers and keys:
            self._saver.expire_at(keys, ttl_s)

    def poll(self) -> None:
        """Give the store what has come up, and let go of what has been copied."""
        if not self.tiers:
            return
        self._news.clear()
        self._loader.poll()
        self._saver.poll()
        if self._demoter is not None:
            self._demoter.poll()

    def demote(self) -> None:
        """Have what the pool would evict next copied to the host tier, where there is one; it waits for nothing."""
        if self._demoter is not None:
            self._demoter.look()

    # The end

    def flush(self, timeout: float) -> None:
        """Wait until all is written, and removed, but no longer than that."""
        until = time.monotonic() + timeout
        while not self.settled and time.monotonic() < until:
            self._news.wait(0.05)
            self.wake()

    def close(self) -> None:
        """End the threads behind what they are at, and close the tiers."""
        ended = [self._loader.close(_CLOSE_S), self._saver.close(_CLOSE_S)]
        if self._demoter is not None:
            ended.append(self._demoter.close(_CLOSE_S))
        if all(ended):
            for tier in self.tiers:
                tier.close()

    def below_pool(self) -> list[SegmentSpec]:
        """The segments that this process has written to the tiers or read from there, those that some tier has."""
        with self._knowing:
            known = list(self._known.values())
        return [spec for spec in known if any(self.holders(form.key) for form in self.forms(spec))]

    def _record(self, spec: SegmentSpec) -> SegmentRecord:
        self._know(spec.lossless)
        return SegmentRecord.of(spec, self._store.keys, self._memory.layers, self._model)

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
    """Nobody polls but the engine's own steps."""


def _nobody_hears(spec: SegmentSpec, left_s: float | None) -> None:
    """Nobody wants to hear of what has come up."""
