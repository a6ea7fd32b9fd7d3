"""The host tier: segments in the memory of the host, below a pool that is a device's.

It is filled by what the pool evicts (kv/demotion.py), not by what is computed. What comes up again stays here as well
while there is room; when there is none, copies of what the pool has go first, and so the two of them hold more than
either. It ends with the process, which alone reads it: private text may be in it, and lifetimes are the engine's to
keep.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from inlay.kv.identity import LOSSLESS
from inlay.kv.offload.codecs import CODECS
from inlay.kv.offload.codecs.codec import Slab
from inlay.kv.offload.counts import TierCounts
from inlay.kv.offload.host_memory import PAGE, HostMemory, Lock, aligned, checksum, pages_for
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import Miss, TierEntry, TierMissError
from inlay.kv.offload.worth import Worth
from inlay.kv.policies import PassCost, Policy, lru
from inlay.slots import SlotRange
from inlay.types import TierStats

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Kept:
    """A segment that is there, or that somebody still reads.

    slabs: the shape and the checksum of each layer's. readers: how many read it. gone: whether nobody else finds it.
    """

    record: SegmentRecord
    pages: tuple[SlotRange, ...]
    slabs: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    readers: int = 0
    gone: bool = False

    @property
    def size(self) -> int:
        """How many pages it takes."""
        return sum(each.length for each in self.pages)


class HostTier:
    """Segments in ``capacity`` bytes of memory, as the pool has them, whatever they have passed through.

    policy, cost: which go first. lock: see HostMemory.
    """

    name = "host"
    codec = LOSSLESS

    def __init__(
        self, capacity: int, policy: Policy = lru, cost: PassCost | None = None, *, lock: Lock | None = None
    ) -> None:
        self.memory = HostMemory(capacity, lock)
        self._guard = threading.Lock()
        self.kept: dict[bytes, Kept] = {}
        self._worth = Worth(policy, cost)
        self.above: OrderedDict[bytes, None] = OrderedDict()  # what the pool has too, and keeps for now
        self._counts = TierCounts()
        # Of what is there; of what is being read, also where it has gone; and of that which has gone.
        self._kept_pages = self._read_pages = self._gone_pages = 0

    @property
    def quota(self) -> int:
        """The most bytes that it may hold."""
        return self.memory.pages * PAGE

    def holds(self, key: bytes) -> bool:
        return key in self.kept

    def unsure(self, key: bytes) -> bool:
        return False

    def find(self, keys: Sequence[bytes]) -> None:
        """What is there is known."""

    def fits(self, record: SegmentRecord) -> bool:
        """Whether there is ever room for a segment."""
        return pages_for(_size_of(record)) <= self.memory.pages

    def get(self, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
        with self.reading(asked) as slab_of:
            for layer in range(len(asked.layers)):
                slab = slab_of(layer)
                if late():
                    raise TierMissError(Miss.LATE)
                take(layer, slab)

    @contextmanager
    def reading(self, asked: SegmentRecord) -> Iterator[Callable[[int], Slab]]:
        """What gives a segment's slabs, one by one, each checked first; they are the tier's again behind the block.

        Counts as read, or missed where TierMissError is raised within the block, as what it gives does.
        """
        with self._guard:
            kept = self.kept.get(asked.key)
            if kept is not None:
                kept.readers += 1
                self._read_pages += kept.size if kept.readers == 1 else 0
        try:
            if kept is None:
                raise TierMissError(Miss.ABSENT)
            if not kept.record.same(asked):
                raise TierMissError(Miss.CORRUPT, "it holds another segment than its key says")
            yield partial(self._slab, kept)
        except TierMissError as miss:
            self._counts.missed(miss.reason)
            if miss.reason is Miss.CORRUPT:
                logger.warning("%s in the memory of the host is not used: %s", asked.key.hex(), miss)
                self.delete(asked.key)
            raise
        finally:
            if kept is not None:
                self._let_go(kept)
        self._counts.hit(asked.tokens)
        with self._guard:
            entry = self._worth.entries.get(asked.key)
            if entry is not None:
                self._worth.note(replace(entry, used=time.time(), uses=entry.uses + 1))

    def put(self, record: SegmentRecord, slabs: Iterable[Slab], uses: int = 0) -> bool:
        """See Tier. Room is made before the first slab is asked for. uses: how often it was read where it was."""
        if self.holds(record.key):
            return True
        pages = self._make_room(_size_of(record))
        if pages is None:
            self._counts.refused()
            return False
        kept = Kept(record, pages)
        try:
            at = 0
            for slab in slabs:
                data = np.ascontiguousarray(slab).reshape(-1)
                kept.slabs.append((slab.shape, checksum(data)))
                self.memory.write(pages, at, data)
                at += aligned(len(data))
        except BaseException:
            with self._guard:
                self.memory.free(pages)
            raise
        with self._guard:
            if record.key in self.kept:  # somebody else was quicker
                self.memory.free(pages)
                return True
            size = sum(each.length for each in pages) * PAGE
            self.kept[record.key] = kept
            self._kept_pages += kept.size
            self._worth.note(replace(TierEntry.of(record, size, time.time()), uses=uses))
        self._counts.wrote(size)
        return True

    def delete(self, key: bytes) -> bool:
        with self._guard:
            return self._remove(key)

    def note_above(self, key: bytes, above: bool) -> None:
        """Note that the pool has a segment too, and keeps it for now; or that it lets it go before long, or has."""
        with self._guard:
            if above and key in self.kept:
                self.above[key] = None
            else:
                self.above.pop(key, None)

    def clear(self) -> None:
        """Forget all of it."""
        with self._guard:
            for key in list(self.kept):
                self._remove(key)

    def expire(self, key: bytes, ttl_s: float) -> None:
        """The engine, which lives as long as this memory, has it forgotten in time."""

    def left_s(self, key: bytes) -> float | None:
        return None

    def iterate(self) -> Iterator[TierEntry]:
        with self._guard:
            entries = list(self._worth.entries.values())
        return iter(sorted(entries, key=lambda entry: entry.used))

    @property
    def has_room(self) -> bool:
        """Nothing is written there behind a computation: it gets what the pool evicts."""
        return False

    def stats(self) -> TierStats:
        return self._counts.stats(self.iterate(), quota=self.quota)

    def refresh(self) -> None:
        """Nobody else puts anything there."""

    def close(self) -> None:
        self.clear()
        self.memory.close()

    def _slab(self, kept: Kept, layer: int) -> Slab:
        shape, expected = kept.slabs[layer]
        at = sum(aligned(math.prod(before)) for before, _ in kept.slabs[:layer])
        data = self.memory.read(kept.pages, at, math.prod(shape))
        if checksum(data) != expected:
            raise TierMissError(Miss.CORRUPT, f"the checksum of layer {layer} does not hold")
        return data.reshape(shape)

    def _let_go(self, kept: Kept) -> None:
        with self._guard:
            kept.readers -= 1
            if not kept.readers:
                self._read_pages -= kept.size
            if kept.gone and not kept.readers:
                self.memory.free(kept.pages)
                self._gone_pages -= kept.size

    def _remove(self, key: bytes) -> bool:
        """Under the guard. Pages that are read come back when that is over."""
        kept = self.kept.pop(key, None)
        if kept is None:
            return False
        self._worth.remove(key)
        self.above.pop(key, None)
        kept.gone = True
        self._kept_pages -= kept.size
        if kept.readers:
            self._gone_pages += kept.size
        else:
            self.memory.free(kept.pages)
        return True

    def _make_room(self, size: int) -> tuple[SlotRange, ...] | None:
        """Pages for so many bytes; None where all that could go would not make room for them, and then nothing goes."""
        ages, read = [], []
        with self._guard:
            may_go = self._kept_pages - (self._read_pages - self._gone_pages)
            if pages_for(size) > self.memory.free_pages + may_go:
                return None
            while (pages := self.memory.allocate(size)) is None:
                entry = self._next_to_go()
                assert entry is not None, "what may go makes enough room"
                if self.kept[entry.key].readers:  # its pages would not come back now
                    read.append(entry)
                    continue
                ages.append(max(0.0, time.time() - entry.used))
                self._worth.evicted(entry)
                self._remove(entry.key)
            for entry in read:
                self._worth.note(entry)
        self._counts.evicted(ages)
        return pages

    def _next_to_go(self) -> TierEntry | None:
        above = next((key for key in self.above if not self.kept[key].readers), None)
        return self._worth.take() if above is None else self._worth.entries[above]


def _size_of(record: SegmentRecord) -> int:
    """How many bytes its slabs take, as the pool has them."""
    form, layers = CODECS[LOSSLESS], range(len(record.layers))
    return sum(aligned(form.nbytes(record.shape(layer), record.kv_dtype)) for layer in layers)
