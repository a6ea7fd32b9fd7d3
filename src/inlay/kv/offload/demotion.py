"""Demotion: copies modules to the host tier before the pool evicts them, in the background.

A module is evicted chunk by chunk from its end, and its rest is useful only together with the end. So the whole module
is copied before its first chunk is evicted. A later load reads only the part that the pool has lost.

Copies are made ahead of need. When little of the pool is free, the next victims are copied (``look``). A decode step
never waits for a copy: it takes a chunk of a segment that is safe, and otherwise any chunk. An admission or a load
waits until its victims are copied, but no longer than a read may take.

A module that is being copied is held, so that its slots are not reused. If a decode step finds no other chunk, the copy
is given up and its result is dropped.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.record import is_finite
from inlay.kv.offload.stack import TierStack
from inlay.kv.segment import Hold, Segment
from inlay.slots import SlotRange

logger = logging.getLogger(__name__)

#: The share of the pool that is kept free or copied ahead, and the share that may be copied at once.
_AHEAD, _AT_ONCE = 1 / 8, 1 / 16
#: For this long, in seconds, a module may be evicted after its copy, even if the host tier has dropped or refused it.
#: Modules that are chosen together share one end: the time starts when the last of them is copied.
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
