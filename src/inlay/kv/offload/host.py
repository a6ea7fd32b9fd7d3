"""The host tier: segments in host memory, below a pool in device memory.

It receives modules that the pool evicts (saver.py), not computed segments. A module that loads again stays here
while there is room. When room is needed, copies of modules in the pool are evicted first, so that the two hold more
together.

The memory is one block, divided into pages, and allocated at the start. Locking it for device copies takes long and
stalls the device. Without locking, pages take no physical memory before they are written.

The tier ends with the process, and no other process reads it. So it may hold private text, and the engine keeps
lifetimes.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from inlay.kv.identity import LOSSLESS
from inlay.kv.offload.codecs import CODECS, Slab
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import Miss, Tier, TierCounts, TierEntries, TierEntry, TierMissError
from inlay.kv.policies import PassCost, Policy, lru
from inlay.kv.pool import FreeSpans
from inlay.slots import SlotRange
from inlay.types import TierStats

PAGE = 16 << 10
ALIGNED = 64  # alignment of slabs in bytes: fits every dtype and the words of the checksum
_ROW = 1024  # words per row of the checksum

Bytes = npt.NDArray[np.uint8]

#: Locks memory for device copies. Returns a function that unlocks it, or None if locking is impossible.
Lock = Callable[[Bytes], Callable[[], None] | None]


class HostMemory:
    """Pages for ``capacity`` bytes. Not thread-safe: one thread at a time may allocate or free.

    Args:
        lock: see Lock; None if no device copies from the memory.
    """

    def __init__(self, capacity: int, lock: Lock | None = None) -> None:
        self.pages = max(1, capacity // PAGE)
        self._free = FreeSpans(self.pages)
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.block = np.frombuffer(mmap.mmap(-1, self.pages * PAGE, **private), np.uint8)
        self._unlock = None if lock is None else lock(self.block)

    @property
    def free_pages(self) -> int:
        return self._free.chunks

    @property
    def free_bytes(self) -> int:
        return self._free.chunks * PAGE

    def allocate(self, size: int) -> tuple[SlotRange, ...] | None:
        """Allocate pages for ``size`` bytes in few ranges; None if there is too little room."""
        wanted = pages_for(size)
        if wanted > self._free.chunks:
            return None
        taken = []
        while wanted:
            fitting = self._free.smallest(wanted)
            best = self._free.largest() if fitting is None else SlotRange(fitting, wanted)
            taken.append(self._free.take(best.first, best.length))
            wanted -= best.length
        return tuple(taken)

    def free(self, ranges: Sequence[SlotRange]) -> None:
        for each in ranges:
            self._free.add(each.first, each.end)

    def write(self, ranges: Sequence[SlotRange], at: int, data: Bytes) -> None:
        """Write bytes at offset ``at`` of an allocation."""
        done = 0
        for part in self._parts(ranges, at, len(data)):
            part[:] = data[done : done + len(part)]
            done += len(part)

    def read(self, ranges: Sequence[SlotRange], at: int, size: int) -> Bytes:
        """Read bytes: a view if they are contiguous, else a copy."""
        parts = self._parts(ranges, at, size)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Unlock the memory. Views that were read stay valid."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def _parts(self, ranges: Sequence[SlotRange], at: int, size: int) -> list[Bytes]:
        parts = []
        for each in ranges:
            length = each.length * PAGE
            begin, end = max(0, at), min(length, at + size)
            if begin < end:
                first = each.first * PAGE
                parts.append(self.block[first + begin : first + end])
            at -= length
        return parts


def pages_for(size: int) -> int:
    return -(-size // PAGE)


def aligned(size: int) -> int:
    """A size rounded up to the alignment of slabs."""
    return -(-size // ALIGNED) * ALIGNED


def checksum(data: Bytes) -> int:
    """A checksum of bytes in memory: the CRC of the sums of all rows and all columns of their words, modulo 2**64.

    It runs at memory speed, unlike a CRC of all bytes. It detects any change within one word, and two swapped words.
    """
    words = data[: len(data) // 8 * 8].view("<u8")
    whole = words[: len(words) // _ROW * _ROW].reshape(-1, _ROW)
    sums = zlib.crc32(np.add.reduce(whole, axis=1, dtype=np.uint64).data)
    sums = zlib.crc32(np.add.reduce(whole, axis=0, dtype=np.uint64).data, sums)
    return zlib.crc32(np.ascontiguousarray(data[whole.size * 8 :]).data, sums)


logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class HostSegment:
    """A segment that is stored or still read.

    Attributes:
        slabs: the shape and checksum of each layer.
        readers: the number of current readers.
        gone: True if it was removed. Its pages are freed after the last reader.
    """

    record: SegmentRecord
    pages: tuple[SlotRange, ...]
    slabs: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    readers: int = 0
    gone: bool = False

    @property
    def size(self) -> int:
        """The number of its pages."""
        return sum(each.length for each in self.pages)


class HostTier(Tier):
    """Segments in ``capacity`` bytes of memory, in the form that they have in the pool.

    Args:
        policy, cost: choose the first segments to evict.
        lock: see HostMemory.
    """

    name = "host"
    codec = LOSSLESS

    def __init__(
        self, capacity: int, policy: Policy = lru, cost: PassCost | None = None, *, lock: Lock | None = None
    ) -> None:
        self.memory = HostMemory(capacity, lock)
        self._guard = threading.Lock()
        self.kept: dict[bytes, HostSegment] = {}
        self._entries = TierEntries(policy, cost)
        self.above: OrderedDict[bytes, None] = OrderedDict()  # also in the pool, and not about to be evicted there
        self._counts = TierCounts()
        # Pages of stored segments; of segments with readers, removed ones included; of removed ones.
        self._kept_pages = self._read_pages = self._gone_pages = 0

    @property
    def quota(self) -> int:
        """The most bytes that it may hold."""
        return self.memory.pages * PAGE

    def holds(self, key: bytes) -> bool:
        return key in self.kept

    def fits(self, record: SegmentRecord) -> bool:
        """True if a segment fits into the empty tier."""
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
        """Yield a function that returns the slab of a layer after its checksum is verified.

        The slabs are valid within the block only. Counts as a hit, or as a miss if TierMissError is raised in the
        block.
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
        self._counts.add(hits=1, hit_tokens=asked.tokens)
        with self._guard:
            entry = self._entries.get(asked.key)
            if entry is not None:
                self._entries.note(replace(entry, used=time.time(), uses=entry.uses + 1))

    def put(self, record: SegmentRecord, slabs: Iterable[Slab], uses: int = 0) -> bool:
        """See Tier. Room is made before the first slab is taken.

        Args:
            record: of the segment.
            slabs: one per layer.
            uses: how often the segment was read in the pool.
        """
        if self.holds(record.key):
            return True
        pages = self._make_room(_size_of(record))
        if pages is None:
            self._counts.add(refused=1)
            return False
        kept = HostSegment(record, pages)
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
            if record.key in self.kept:  # another thread was quicker
                self.memory.free(pages)
                return True
            size = sum(each.length for each in pages) * PAGE
            self.kept[record.key] = kept
            self._kept_pages += kept.size
            self._entries.note(replace(TierEntry.of(record, size, time.time()), uses=uses))
        self._counts.add(writes=1, written_bytes=size)
        return True

    def delete(self, key: bytes) -> bool:
        with self._guard:
            return self._remove(key)

    def note_above(self, key: bytes, above: bool) -> None:
        """Record whether the pool has a segment, too.

        Args:
            key: of the segment.
            above: False if the pool evicts the segment soon, or has evicted it.
        """
        with self._guard:
            if above and key in self.kept:
                self.above[key] = None
            else:
                self.above.pop(key, None)

    def clear(self) -> None:
        """Remove all segments."""
        with self._guard:
            for key in list(self.kept):
                self._remove(key)

    def expire(self, key: bytes, ttl_s: float) -> None:
        """Do nothing: the engine ends lifetimes, and it lives as long as this memory."""

    def iterate(self) -> Iterator[TierEntry]:
        with self._guard:
            entries = list(self._entries.values())
        return iter(sorted(entries, key=lambda entry: entry.used))

    def labelled(self, labels: Iterable[bytes]) -> list[TierEntry]:
        with self._guard:
            return self._entries.labelled(labels)

    @property
    def has_room(self) -> bool:
        """False: it receives evicted modules, not background writes."""
        return False

    def stats(self) -> TierStats:
        return self._counts.stats(self.iterate(), quota=self.quota)

    def close(self) -> None:
        self.clear()
        self.memory.close()

    def _slab(self, kept: HostSegment, layer: int) -> Slab:
        shape, expected = kept.slabs[layer]
        at = sum(aligned(math.prod(before)) for before, _ in kept.slabs[:layer])
        data = self.memory.read(kept.pages, at, math.prod(shape))
        if checksum(data) != expected:
            raise TierMissError(Miss.CORRUPT, f"the checksum of layer {layer} does not hold")
        return data.reshape(shape)

    def _let_go(self, kept: HostSegment) -> None:
        with self._guard:
            kept.readers -= 1
            if not kept.readers:
                self._read_pages -= kept.size
            if kept.gone and not kept.readers:
                self.memory.free(kept.pages)
                self._gone_pages -= kept.size

    def _remove(self, key: bytes) -> bool:
        """Call under the guard. Pages with readers are freed after the last one."""
        kept = self.kept.pop(key, None)
        if kept is None:
            return False
        self._entries.remove(key)
        self.above.pop(key, None)
        kept.gone = True
        self._kept_pages -= kept.size
        if kept.readers:
            self._gone_pages += kept.size
        else:
            self.memory.free(kept.pages)
        return True

    def _make_room(self, size: int) -> tuple[SlotRange, ...] | None:
        """Allocate pages. Returns None, and evicts nothing, if evicting everything would not make enough room."""
        ages, read = [], []
        with self._guard:
            may_go = self._kept_pages - (self._read_pages - self._gone_pages)
            if pages_for(size) > self.memory.free_pages + may_go:
                return None
            while (pages := self.memory.allocate(size)) is None:
                entry = self._next_to_go()
                assert entry is not None, "what may go makes enough room"
                if self.kept[entry.key].readers:  # its pages would not be free yet
                    read.append(entry)
                    continue
                ages.append(max(0.0, time.time() - entry.used))
                self._entries.evicted(entry)
                self._remove(entry.key)
            for entry in read:
                self._entries.note(entry)
        self._counts.evicted(ages)
        return pages

    def _next_to_go(self) -> TierEntry | None:
        above = next((key for key in self.above if not self.kept[key].readers), None)
        return self._entries.take() if above is None else self._entries[above]


def _size_of(record: SegmentRecord) -> int:
    """The bytes that the slabs take in the pool's form."""
    form, layers = CODECS[LOSSLESS], range(len(record.layers))
    return sum(aligned(form.nbytes(record.shape(layer), record.kv_dtype)) for layer in layers)
