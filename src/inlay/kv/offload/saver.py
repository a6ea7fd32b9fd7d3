"""Writes segments to the tiers below the pool, in the background: ``Saver`` computed ones, ``Demoter`` evicted ones.

``Saver``: a segment is copied from the pool under a hold. Removals and lifetimes go through the same thread, in order.

``Demoter`` copies modules to the host tier before the pool evicts them, in the background. A module is evicted chunk by
chunk from its end, and its rest is useful only together with the end. So the whole module is copied before its first
chunk is evicted. A later load reads only the part that the pool has lost.

Copies are made ahead of need. When little of the pool is free, the next victims are copied (``look``). A decode step
never waits for a copy: it takes a chunk of a segment that is safe, and otherwise any chunk. An admission or a load
waits until its victims are copied, but no longer than a read may take.

A module that is being copied is held, so that its slots are not reused. If a decode step finds no other chunk, the copy
is given up and its result is dropped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.record import SegmentRecord, is_finite, is_finite_state
from inlay.kv.offload.stack import TierStack
from inlay.kv.offload.tier import Tier, TierMissError
from inlay.kv.pool import Hold, Segment, StoredState
from inlay.slots import SlotRange

logger = logging.getLogger(__name__)

#: The share of the pool that is kept free or copied ahead, and the share that may be copied at once.
_AHEAD, _AT_ONCE = 1 / 8, 1 / 16
#: Seconds after its copy in which a module may be evicted, even if the host tier has dropped or refused it. Modules
#: that are copied together share this time, from the copy of the last one on.
OFFERED_S = 5.0


class _NoNumbersError(Exception):
    """A slab contains NaN or infinity."""


class _GivenUpError(Exception):
    """A module was forgotten or given up during its copy."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A module that is being copied.

    Attributes:
        hold: keeps it in the pool during the copy.
        uses: how often it was read.
    """

    spec: SegmentSpec
    slots: tuple[SlotRange, ...]
    hold: Hold
    uses: int
    given_up: bool = False

    def give_up(self) -> None:
        self.given_up = True
        self.hold.release()


@dataclass(eq=False, slots=True)
class _DemotedModules:
    """Modules that are copied together, by key.

    Attributes:
        deadline: the end of the wait for them, on the clock of ``time.monotonic``.
    """

    copies: dict[bytes, _Copy]
    deadline: float
    over: bool = False


class Demoter:
    """Fills the host tier of one store; see Demotion. Call every method with the engine lock held.

    Args:
        timeout_s: the longest wait for copies, in seconds.

    Attributes:
        not_copied: modules that were evicted, wholly or in part, without a copy in the host tier.
    """

    def __init__(self, stack: TierStack, host: HostTier, timeout_s: float) -> None:
        self.not_copied = 0
        self._stack = stack
        self._store = stack.store
        self._host = host
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[bytes, SegmentSpec] = OrderedDict()
        self._batch: _DemotedModules | None = None
        #: By key, the time since when a module may be evicted, with or without a copy. Oldest first.
        self.offered: OrderedDict[bytes, float] = OrderedDict()
        self._began = self._remembered = 0.0  # time of the last choice; end of its grace period
        self._looked: int | None = None  # allocated chunks at the last look; None while many are free

    @property
    def moving(self) -> bool:
        """True if the caller can wait for a copy."""
        return self._batch is not None and time.monotonic() < self._batch.deadline

    @property
    def copying(self) -> bool:
        """True if anything is being copied, late or not."""
        return self._batch is not None

    @property
    def settled(self) -> bool:
        """True if nothing is being copied or queued for it."""
        return self._batch is None and not self._waiting

    def is_safe(self, segment: Segment) -> bool:
        """See Demotion."""
        return not any(map(self._is_lost, segment.specs))

    def begin(self, segments: Iterable[Segment]) -> bool:
        """See Demotion. During a batch nothing is added: victims are chosen again after it."""
        if self._batch is None:
            self._began, self._remembered = time.monotonic(), math.inf
            for segment in segments:
                self._waiting.update((key, spec) for key, spec in segment.specs.items() if self._is_lost(key))
            self._copy_next()
        return self.moving

    def give_up(self) -> None:
        """See Demotion."""
        for each in {} if self._batch is None else self._batch.copies.values():
            each.give_up()

    def evicted(self, segment: Segment) -> None:
        """See Demotion."""
        for key in segment.specs:
            self.offered.pop(key, None)  # if it returns, it is copied again
            self._host.note_above(key, False)
            self.not_copied += not self._host.holds(key)

    def returned(self, key: bytes) -> None:
        """Record that the pool has a module again. The host tier evicts its copy before others."""
        self._host.note_above(key, True)

    def look(self) -> None:
        """If little of the pool is free, start to copy the next victims. Repeated only after further allocations."""
        pool = self._store.pool
        ahead = max(2, int(pool.chunks * _AHEAD))
        if pool.free_chunks >= ahead:
            self._looked = None
        if pool.free_chunks >= ahead or self._batch is not None:
            return
        allocated = self._store.allocated_chunks
        if self._looked is not None and allocated - self._looked < ahead // 2:
            return
        self._looked = allocated
        going = self._store.next_to_go(ahead - pool.free_chunks)
        for segment in going:
            for key in segment.specs:
                self._host.note_above(key, False)
        self.begin(going)

    def poll(self) -> None:
        """Release the copied modules and start the next batch."""
        if self._batch is not None and self._batch.over:
            for each in self._batch.copies.values():
                each.hold.release()
                if not each.given_up:
                    self._offer(each.spec.key)
            self._batch = None
        self._copy_next()

    def forget(self, key: bytes) -> None:
        """Do not copy a module. The caller or the copying thread deletes a copy in progress."""
        self._waiting.pop(key, None)
        copy = None if self._batch is None else self._batch.copies.get(key)
        if copy is not None:
            copy.give_up()

    def clear(self) -> None:
        """Stop all copies and clear the host tier."""
        self.give_up()
        self._waiting.clear()
        self._host.clear()

    def _is_lost(self, key: bytes) -> bool:
        """True if evicting a module now loses it, although a copy is possible."""
        return not self._host.holds(key) and self._is_over(self.offered.get(key, -math.inf))

    def _is_over(self, offered: float) -> bool:
        now = time.monotonic()
        return offered + OFFERED_S <= (self._began if now < self._remembered else now)

    def _offer(self, key: bytes) -> None:
        self.offered[key] = time.monotonic()
        self.offered.move_to_end(key)
        while self._is_over(next(iter(self.offered.values()))):
            self.offered.popitem(last=False)

    def _copy_next(self) -> None:
        most, tokens = self._store.pool.slots * _AT_ONCE, 0
        copies: dict[bytes, _Copy] = {}
        while self._batch is None and self._waiting and tokens < most:
            key, spec = self._waiting.popitem(last=False)
            found = self._store.peek(spec)
            if found is None or not self._host.fits(self._stack.record(spec)):  # part of it is gone already
                self._offer(key)
                continue
            uses = min(segment.use.frequency for segment in found.segments)
            copies[key] = _Copy(spec, found.slots, self._store.hold(found), uses)
            tokens += len(spec.ids)
        if copies:
            batch = self._batch = _DemotedModules(copies, time.monotonic() + self._timeout_s)
            self._stack.threads.copier.post(lambda: self._copy(batch))
        if self._batch is None and self._remembered == math.inf:
            self._remembered = time.monotonic() + OFFERED_S

    # On a background thread

    def _copy(self, batch: _DemotedModules) -> None:
        try:
            for each in batch.copies.values():
                self._copy_one(each)
        finally:
            batch.over = True
            self._stack.tell()

    def _copy_one(self, copy: _Copy) -> None:
        key = copy.spec.key
        if copy.given_up:  # do not evict others for it
            return
        try:
            self._host.put(self._stack.record(copy.spec), self._slabs(copy), max(0, copy.uses - 1))
        except _NoNumbersError:
            logger.warning("%s is not kept in the memory of the host: it holds what is no number", key.hex())
        except _GivenUpError:
            pass
        except Exception:
            logger.exception("%s could not be copied to the memory of the host", key.hex())
        if copy.given_up:
            self._host.delete(key)

    def _slabs(self, copy: _Copy) -> Iterator[Slab]:
        for layer in range(self._stack.layers):
            slab = self._stack.memory.read_slab(layer, copy.slots)
            if copy.given_up:  # its slots may belong to other segments by now
                raise _GivenUpError
            if not is_finite(slab, self._store.keys.kv_dtype):
                raise _NoNumbersError
            yield slab


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

    def add_labels(self, spec: SegmentSpec) -> None:
        """See Residency.add_labels. A segment that is still to be written gets them with its record."""
        forms = list(self._stack.forms(spec.lossless))
        saving = None if self._saving is None else self._saving.spec.key
        coming = any(form.key in self._waiting or form.key == saving for form in forms)
        for tier in self._stack.written:
            for form in forms:
                if coming or tier.holds(form.key):
                    self._writer.post(partial(tier.add_labels, form.key, spec.labels))

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
            key, (spec, _) = next(iter(self._waiting.items()))
            try:
                self._saving = self._begin(spec)
            finally:
                del self._waiting[key]  # afterwards: ``settled`` is read without the lock

    def _begin(self, spec: SegmentSpec) -> _Save | None:
        """Start to write a segment. Returns None if it cannot be written or is written already."""
        found = self._store.get(spec)
        state = None if found is None else found.state
        if found is None and not self._stack.is_in_host(spec.key):
            self.not_written += 1
            return None
        if self._stack.states is not None and state is None:
            self.not_written += 1  # without its state it would be of no use
            return None
        if self._is_written(spec):
            return None
        slots, hold = ((), Hold()) if found is None else (found.slots, self._store.hold(found))
        if state is not None and self._store.states is not None:
            self._store.states.acquire(state)
        save = _Save(spec, slots, hold, state)
        self._writer.post(partial(self._write, save))
        return save

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
