"""Demotion: modules that the pool is about to evict are copied to the host tier, behind what goes on.

A module goes from its end, chunk by chunk, and what is left of it is of use only with the rest: so all of it is copied
before its first chunk goes, and what is read again of it later is what the pool has lost.

Copies are made ahead: whenever little of the pool is free, of what goes next (``look``). So a decode step that needs a
chunk finds one whose going loses nothing, and takes another where it does not: it waits for no copy. Who is to be
admitted, or read from below, waits until what has to go for it is copied, but no longer than a read may take.

What is copied is held, so that nothing else comes into its slots before the copy is over. Only where a decode step
finds no other chunk is the copy given up, and what came of it dropped.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.codecs.codec import Slab
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.record import SegmentRecord, SlabMemory, is_finite
from inlay.kv.offload.worker import Worker
from inlay.kv.segment import Hold, Segment
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange

logger = logging.getLogger(__name__)

#: The part of the pool that is free, or copied ahead; and the part of which copies may be under way at once.
_AHEAD, _AT_ONCE = 1 / 8, 1 / 16
#: For so long what has been copied may go, once, although the host tier has dropped it, or would not have it: behind
#: the last of those that it was copied together with, however long they take.
OFFERED_S = 5.0


class _NoNumbersError(Exception):
    """A slab holds what is no number."""


class _GivenUpError(Exception):
    """A module was to be forgotten while it was copied."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A module that is being copied. hold: what keeps it where it is until then. uses: how often it was read."""

    spec: SegmentSpec
    slots: tuple[SlotRange, ...]
    hold: Hold
    uses: int
    given_up: bool = False

    def give_up(self) -> None:
        self.given_up = True
        self.hold.release()


@dataclass(eq=False, slots=True)
class _Batch:
    """Modules that are copied together, by key. deadline: until when it is waited for them."""

    copies: dict[bytes, _Copy]
    deadline: float
    over: bool = False


class Demoter:
    """Fills the host tier of one store. record_of: what is kept of a module. timeout_s: how long copies are waited for.

    tell: told, on any thread, that something has come further. Every method is called on the engine's turn.
    not_copied: modules that went, wholly or in part, while the host tier did not have them.
    """

    def __init__(
        self,
        store: SegmentStore,
        memory: SlabMemory,
        host: HostTier,
        *,
        record_of: Callable[[SegmentSpec], SegmentRecord],
        tell: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.not_copied = 0
        self._store = store
        self._memory = memory
        self._host = host
        self._record_of = record_of
        self._tell = tell
        self._timeout_s = timeout_s
        self._worker = Worker("inlay-demoter")
        self._waiting: OrderedDict[bytes, SegmentSpec] = OrderedDict()
        self._batch: _Batch | None = None
        #: Since when modules may go whether or not the host tier has them, the first of them first.
        self.offered: OrderedDict[bytes, float] = OrderedDict()
        self._began = self._remembered = 0.0  # when the last were chosen, and until when all since then may go
        self._looked: int | None = None  # how many chunks had been allocated by then; None where many are free
        store.demotion = self

    @property
    def moving(self) -> bool:
        """Whether anything is being copied that can be waited for."""
        return self._batch is not None and time.monotonic() < self._batch.deadline

    @property
    def copying(self) -> bool:
        """Whether anything is being copied, also what is not waited for any more."""
        return self._batch is not None

    @property
    def settled(self) -> bool:
        """Whether nothing is copied, or waits for that."""
        return self._batch is None and not self._waiting

    def is_safe(self, segment: Segment) -> bool:
        """See Demotion."""
        return not any(map(self._is_lost, segment.specs))

    def begin(self, segments: Iterable[Segment]) -> bool:
        """See Demotion. While a batch is under way nothing is added: what goes is chosen anew behind it."""
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
            self.offered.pop(key, None)  # what comes back is copied again
            self._host.note_above(key, False)
            self.not_copied += not self._host.holds(key)

    def arrived(self, key: bytes) -> None:
        """The pool has a module that came from below: the host tier's copy of it goes before others."""
        self._host.note_above(key, True)

    def look(self) -> None:
        """Where little of the pool is free, have copied what goes next; at most once for some of it allocated."""
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
        """Let go of what has been copied, and begin with the next."""
        if self._batch is not None and self._batch.over:
            for each in self._batch.copies.values():
                each.hold.release()
                if not each.given_up:
                    self._offer(each.spec.key)
            self._batch = None
        self._copy_next()

    def forget(self, key: bytes) -> None:
        """Copy no such module; one that is being copied is removed, by whoever is told to forget it or is at it."""
        self._waiting.pop(key, None)
        copy = None if self._batch is None else self._batch.copies.get(key)
        if copy is not None:
            copy.give_up()

    def clear(self) -> None:
        """Copy none of what is here now, and forget what was copied."""
        self.give_up()
        self._waiting.clear()
        self._host.clear()

    def close(self, timeout: float) -> bool:
        """End the thread behind what it is at; returns whether it has ended by then."""
        return self._worker.close(timeout)

    def _is_lost(self, key: bytes) -> bool:
        """Whether a module that goes now would be nowhere in this process's memory, and could be."""
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
            if found is None or not self._host.fits(self._record_of(spec)):  # no more than a part of it is here
                self._offer(key)
                continue
            uses = min(segment.use.frequency for segment in found.segments)
            copies[key] = _Copy(spec, found.slots, self._store.hold(found), uses)
            tokens += len(spec.ids)
        if copies:
            batch = self._batch = _Batch(copies, time.monotonic() + self._timeout_s)
            self._worker.submit(lambda: self._copy(batch))
        if self._batch is None and self._remembered == math.inf:
            self._remembered = time.monotonic() + OFFERED_S

    # On a thread of its own

    def _copy(self, batch: _Batch) -> None:
        try:
            for each in batch.copies.values():
                self._copy_one(each)
        finally:
            batch.over = True
            self._tell()

    def _copy_one(self, copy: _Copy) -> None:
        key = copy.spec.key
        if copy.given_up:  # no room is made for it
            return
        try:
            self._host.put(self._record_of(copy.spec), self._slabs(copy), max(0, copy.uses - 1))
        except _NoNumbersError:
            logger.warning("%s is not kept in the memory of the host: it holds what is no number", key.hex())
        except _GivenUpError:
            pass
        except Exception:
            logger.exception("%s could not be copied to the memory of the host", key.hex())
        if copy.given_up:
            self._host.delete(key)

    def _slabs(self, copy: _Copy) -> Iterator[Slab]:
        for layer in range(len(self._memory.layers)):
            slab = self._memory.read_slab(layer, copy.slots)
            if copy.given_up:  # its slots may be others' by now
                raise _GivenUpError
            if not is_finite(slab, self._store.keys.kv_dtype):
                raise _NoNumbersError
            yield slab
