"""Residency: where the KV of segments lies, and how it moves between the pool and the tiers below it.

The store's index finds segments in the pool. ``Residency`` is the one object through which the engine uses the tiers
below. See the package docstring for the states of a segment.

A tier may write segments through a codec. Such a segment loads as another segment, a *form* of the written one
(identity.py), and lies in the pool as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from inlay.kv.identity import TEXT_LABEL, SegmentSpec
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.loader import Arrival, Coming, Loader
from inlay.kv.offload.record import SlabMemory, StateMemory
from inlay.kv.offload.saver import Demoter, Saver
from inlay.kv.offload.stack import LATE, TierStack
from inlay.kv.offload.tier import Tier
from inlay.kv.pool import PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.types import TierStats

_CLOSE_S = 5.0  # for the current reads and writes


class Residency:
    """The tiers below the pool of one store. There may be none.

    Call the methods under "With the engine lock held" with that lock only, the others from any thread.

    Args:
        memory: of the pool.
        tiers: the tiers below the host tier, nearest first.
        host: the tier that receives evicted modules. None if the pool lies in host memory itself.
        model: the model's public name.
        timeout_s: the longest time a read may take, in seconds.
        states: the states of a model with recurrent layers. None without.
        wake: called on any thread when ``poll`` has work. Call ``poll`` between two steps then.

    Attributes:
        tiers: all tiers, nearest first.
        codecs, misses: see TierStack.
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
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._stack = TierStack(store, memory, tiers, host=host, model=model, states=states, wake=wake)
        self.tiers, self.codecs, self.misses = self._stack.tiers, self._stack.codecs, self._stack.misses
        self._store = store
        self._saver = Saver(self._stack)
        self._loader = Loader(self._stack, self._saver, timeout_s)
        self._demoter = None if host is None else Demoter(self._stack, host, timeout_s)
        if self._demoter is not None:
            store.demote_with(self._demoter)

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
        return self._stack.told, self._loader.version, self.moving

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

    def below_pool(self) -> list[SegmentSpec]:
        """The segments that this process wrote to the tiers or read from them, if a tier still has them."""
        return [spec for spec in self._stack.known() if any(self.holders(form.key) for form in self.forms(spec))]

    def unsure(self, key: bytes) -> bool:
        """True if a tier must be asked for a segment, or is being asked; see ``seek``."""
        return self._loader.is_sought(key) or any(tier.unsure(key) for tier in self.tiers)

    def bringing(self, keys: Iterable[bytes]) -> frozenset[bytes]:
        """The keys whose segments are loading."""
        return frozenset(filter(self._loader.is_coming, keys))

    def forms(self, spec: SegmentSpec) -> Iterator[SegmentSpec]:
        """A segment and the forms that may be read in its place, most exact first."""
        return self._stack.forms(spec)

    def came_from(self, key: bytes) -> str | None:
        """The tier of a segment's current or last load. None if it is not remembered."""
        return self._loader.came_from(key)

    def arriving(self, key: bytes) -> Arrival | None:
        """A segment that may be read while it loads, layer by layer. None for any other segment."""
        return self._loader.arriving(key)

    def why_missing(self, spec: SegmentSpec) -> str:
        """Return why a segment that is neither in the pool nor loading must be computed; see MissReasons."""
        if any(self._loader.will_arrive(form.key) or self._loader.is_sought(form.key) for form in self.forms(spec)):
            return LATE
        return self.misses.explain(spec)

    def wait(self, timeout: float) -> None:
        """Block until there is progress or the timeout in seconds is over."""
        self._stack.news.wait(timeout)

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
        coming = self._loader.bring_up(wanted)
        return Coming.NOT if coming in (Coming.LATER, Coming.FREEING) and not self.moving else coming

    def computed(self, spec: SegmentSpec) -> None:
        """Record that a segment was computed and is in the pool."""
        self.misses.stored(spec)
        for form in self.forms(spec):
            self._loader.try_again(form.key)

    def save(self, spec: SegmentSpec) -> None:
        """Write a stored segment to the tiers in the background."""
        self._saver.save(spec)

    def add_labels(self, specs: Iterable[SegmentSpec]) -> None:
        """Add the labels of segments that are read, here and in the tiers that have them. See TierStack.add_labels."""
        for spec in self._stack.add_labels(specs):
            self._saver.add_labels(spec)

    def labels(self, spec: SegmentSpec) -> tuple[bytes, ...]:
        """Return the labels of a segment, see TierStack.labels."""
        return self._stack.labels(spec)

    def forget(self, key: bytes) -> None:
        """Stop the segment's copies, loads and writes, and remove it from the tiers. Its forms are other segments."""
        if self._demoter is not None:
            self._demoter.forget(key)
        if self.tiers:
            self._loader.forget(key)
            self._saver.forget(key)

    def known(self) -> list[SegmentSpec]:
        """Return the segments that this process wrote to the tiers or read from them.

        The tiers may have evicted some.
        """
        return self._stack.known()

    def forget_labelled(self, labels: frozenset[bytes]) -> int:
        """Forget the segments with any of these labels, in the tiers or still to be written to them.

        Those of earlier processes are included. A shared tier keeps those that this process has neither written nor
        read.

        Returns:
            The number of tokens that were in a tier and not forgotten before.
        """
        tokens = 0
        for spec in self._saver.unwritten():
            if not labels.isdisjoint(self.labels(spec)):
                for form in self.forms(spec):
                    self.forget(form.key)
        for tier in self.tiers if labels else ():
            for entry in tier.labelled(labels):
                if entry.fingerprint == self._store.keys.fingerprint:
                    tokens += 0 if self._saver.forgets(entry.key) else entry.tokens
                    self.forget(entry.key)
        return tokens

    def forget_prefixes(self, labels: frozenset[bytes]) -> None:
        """Forget the text of prompts in the tiers that has any of these labels. See ``forget_labelled``.

        Only models with recurrent layers have such text.
        """
        for spec in self._saver.unwritten():
            if TEXT_LABEL in spec.labels and not labels.isdisjoint(spec.labels):
                self.forget(spec.key)
        for tier in self.tiers if self._stack.states is not None else ():
            for entry in tier.labelled(labels):
                if entry.fingerprint == self._store.keys.fingerprint and TEXT_LABEL in entry.labels:
                    self.forget(entry.key)

    def clear_host(self) -> None:
        """Clear the host tier and discard loads from it. Other tiers keep their segments."""
        if self._demoter is not None:
            self._loader.forget_host()
            self._demoter.clear()

    def expire_at(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Have the tiers remove segments after this many seconds, even if this process has ended by then."""
        if self.tiers and keys:
            self._saver.expire_at(keys, ttl_s)

    def poll(self) -> list[tuple[SegmentSpec, float | None]]:
        """Insert loaded segments into the store and release copied ones.

        Returns:
            The loaded segments, each with its remaining lifetime in seconds; None for no end.
        """
        if not self.tiers:
            return []
        self._stack.news.clear()
        loaded = self._loader.poll()
        self._saver.poll()
        if self._demoter is not None:
            for spec, _ in loaded:
                self._demoter.returned(spec.key)
            self._demoter.poll()
        return loaded

    def demote(self) -> None:
        """Start to copy the next victims to the host tier, if there is one. Does not wait."""
        if self._demoter is not None:
            self._demoter.look()

    # Shutdown

    def flush(self, timeout: float) -> None:
        """Wait until everything is written and removed, for at most this many seconds."""
        until = time.monotonic() + timeout
        while not self.settled and time.monotonic() < until:
            self._stack.news.wait(0.05)
            self._stack.wake()

    def close(self) -> None:
        """End the threads after their current jobs, and close the tiers."""
        if self._stack.threads.close(_CLOSE_S):
            for tier in self.tiers:
                tier.close()
