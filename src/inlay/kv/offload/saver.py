"""Writes segments to the tiers below the pool, in the background.

A segment is copied from the pool under a hold. Removals and lifetimes go through the same thread, in order.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.record import SegmentRecord, is_finite, is_finite_state
from inlay.kv.offload.stack import TierStack
from inlay.kv.offload.tier import Tier, TierMissError
from inlay.kv.segment import Hold, StoredState
from inlay.slots import SlotRange

#: Segments in the write queue; beyond that, the oldest are dropped.
_MOST_WAITING = 4096
_MOST_PROMOTIONS = 64  # segments that wait for a copy to nearer tiers; further ones are skipped


@dataclass(eq=False, slots=True)
class _Save:
    """A segment that is being written. ``hold`` keeps it in the pool until it is copied.

    ``slots`` are empty if the segment is no longer in the pool and is read from the host tier. ``state`` is the
    recurrent state behind it, which is acquired until it is copied.
    """

    spec: SegmentSpec
    slots: tuple[SlotRange, ...]
    hold: Hold
    state: StoredState | None = None
    copied: bool = False
    released: bool = False
    over: bool = False
    given_up: bool = False


class Saver:
    """Writes segments of one store to the written tiers, and removes segments from all tiers.

    Segments of a model with recurrent layers are only written with the state behind them.

    Attributes:
        not_written: segments that were evicted or dropped from the queue before they were written.
    """

    def __init__(self, stack: TierStack) -> None:
        self.not_written = 0
        self._stack = stack
        self._store = stack.store
        self._writer = stack.threads.writer
        self._promoting = 0  # segments in promotion from tier to tier, or waiting for it
        self._profiles = 0  # profiles that are still to be written
        self._counting = threading.Lock()
        # by key: the segment and its time of entry
        self._waiting: OrderedDict[bytes, tuple[SegmentSpec, float]] = OrderedDict()
        self._saving: _Save | None = None
        self._deleting: set[bytes] = set()  # keys that are still to be removed from the tiers

    @property
    def copying(self) -> bool:
        """True while a segment is referenced for its copy. ``poll`` releases it once it is copied."""
        saving = self._saving
        return saving is not None and not saving.released

    @property
    def waiting(self) -> int:
        """The number of segments that are waiting or being written."""
        return len(self._waiting) + (self._saving is not None)

    @property
    def settled(self) -> bool:
        """True if nothing is left to write, remove or promote, profiles included."""
        return not self.waiting and not self._deleting and not self._promoting and not self._profiles

    @property
    def lag_s(self) -> float:
        """How long the first segment has waited, in seconds."""
        for _, since in self._waiting.copy().values():  # the engine thread may change it meanwhile
            return time.monotonic() - since
        return 0.0

    def forgets(self, key: bytes) -> bool:
        """True if a segment is still to be removed from the tiers."""
        return key in self._deleting

    # With the engine lock held

    def save(self, spec: SegmentSpec) -> None:
        """See Residency.save."""
        if spec.key in self._waiting or self._is_written(spec):
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popitem(last=False)
            self.not_written += 1
        self._waiting[spec.key] = spec, time.monotonic()
        self._save_next()

    def unwritten(self) -> list[SegmentSpec]:
        """The segments that are queued for writing or being written."""
        waiting = [spec for spec, _ in self._waiting.values()]
        return waiting if self._saving is None else [self._saving.spec, *waiting]

    def forget(self, key: bytes) -> None:
        """See Residency.forget."""
        self._waiting.pop(key, None)
        if self._saving is not None and self._saving.spec.key == key:
            self._saving.given_up = True
            self._let_go(self._saving)
        self._deleting.add(key)
        self._writer.post(lambda: self._delete(key))

    def expire_at(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """See Residency.expire_at."""
        self._writer.post(lambda: self._expire_at(keys, ttl_s))

    def add_profile(self, spec: SegmentSpec, deviations: bytes) -> None:
        """See Residency.add_profile."""
        disks = [tier for tier in self._stack.written if isinstance(tier, DiskTier)]
        if not disks:
            return
        with self._counting:
            self._profiles += 1

        def put() -> None:
            try:
                for tier in disks:
                    tier.add_profile(self._stack.form_in(tier, spec).key, spec.key, deviations)
            finally:
                with self._counting:
                    self._profiles -= 1
                self._stack.news.set()

        self._writer.post(put)

    def poll(self) -> None:
        """Release copied segments and start the next one."""
        saving = self._saving
        if saving is not None and saving.copied:
            self._let_go(saving)
        if saving is not None and saving.over:
            self._saving = None
        self._save_next()

    def _save_next(self) -> None:
        while self._saving is None and self._waiting:
            _, (spec, _) = self._waiting.popitem(last=False)
            found = self._store.get(spec)
            state = None if found is None else found.state
            if found is None and not self._stack.is_in_host(spec.key):
                self.not_written += 1
            elif self._stack.states is not None and state is None:
                self.not_written += 1  # without its state it would be of no use
            elif not self._is_written(spec):
                slots, hold = ((), Hold()) if found is None else (found.slots, self._store.hold(found))
                if state is not None and self._store.states is not None:
                    self._store.states.acquire(state)
                save = self._saving = _Save(spec, slots, hold, state)
                self._writer.post(partial(self._write, save))

    def _let_go(self, save: _Save) -> None:
        save.hold.release()
        save.released = True
        if save.state is not None and self._store.states is not None:
            self._store.states.release(save.state)
            save.state = None

    def _is_written(self, spec: SegmentSpec) -> bool:
        """True if each tier has the segment in its own form, and no removal is pending."""
        written = [(tier, self._stack.form_in(tier, spec).key) for tier in self._stack.written]
        return all(tier.holds(key) and key not in self._deleting for tier, key in written)

    def promote(self, record: SegmentRecord, slabs: list[Slab], tier: Tier) -> None:
        """Copy a segment that was read from a tier to the nearer written tiers, behind the queued work."""
        with self._counting:
            if self._promoting >= _MOST_PROMOTIONS:
                return
            self._promoting += 1

        def put() -> None:
            try:
                for nearer in self._stack.nearer(tier):
                    if tier.holds(record.key):  # it has not been removed meanwhile
                        nearer.put(record, slabs)
            finally:
                with self._counting:
                    self._promoting -= 1
                self._stack.news.set()

        self._writer.post(put)

    # On a background thread

    def _write(self, save: _Save) -> None:
        stack = self._stack
        try:
            slabs = self._slabs(save)
            finite = bool(slabs) and all(is_finite(slab, self._store.keys.kv_dtype) for slab in slabs)
            if save.state is not None and stack.states is not None:
                state = stack.states.read(save.state.slot)
                finite = is_finite_state(state, stack.states.layout) and (finite or not stack.layers)
                slabs.append(state)
            save.copied = True
            stack.tell()
            if save.given_up or not finite:
                return
            for tier in stack.written:
                tier.put(stack.record(stack.form_in(tier, save.spec)), slabs)
            if save.given_up:
                for form in stack.forms(save.spec):
                    self._delete(form.key)
        finally:
            save.copied = save.over = True
            stack.tell()

    def _slabs(self, save: _Save) -> list[Slab]:
        """The slabs of a segment; empty if it has left the host tier meanwhile."""
        stack = self._stack
        if save.slots:
            return [stack.memory.read_slab(layer, save.slots) for layer in range(stack.layers)]
        slabs: list[Slab] = []
        if stack.host is not None:
            with suppress(TierMissError):
                stack.host.get(stack.record(save.spec), lambda layer, slab: slabs.append(slab.copy()), lambda: False)
        if len(slabs) < stack.layers:
            self.not_written += 1
            return []
        return slabs

    def _delete(self, key: bytes) -> None:
        try:
            for tier in self._stack.tiers:
                tier.delete(key)
        finally:
            self._deleting.discard(key)
            self._stack.news.set()

    def _expire_at(self, keys: Sequence[bytes], ttl_s: float) -> None:
        for key in keys:
            for tier in self._stack.tiers:
                tier.expire(key, ttl_s)
