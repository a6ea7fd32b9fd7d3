"""The memory of the host tier: one block, divided into pages, in which segments lie one slab behind the other.

It is one block and made at the start, since to lock memory in place, so that a device copies from it by itself, takes
long and stops what the device does. Where nothing is locked, pages take no memory before they are written.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inlay.kv.spans import FreeSpans
from inlay.slots import SlotRange

PAGE = 16 << 10
ALIGNED = 64  # bytes that a slab begins at a multiple of: an element of any dtype, and a word of a checksum
_ROW = 1024  # words that are summed as a row

Bytes = npt.NDArray[np.uint8]

#: Locks memory in place for a device, and returns what lets go of it again; None where that cannot be.
Lock = Callable[[Bytes], Callable[[], None] | None]


class HostMemory:
    """Pages of ``capacity`` bytes. What is allocated is given back by whoever has it; one thread at a time does either.

    lock: see Lock; None where no device copies from it.
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
        """Ranges of pages for so many bytes, few of them; None where there are not enough."""
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
        """Put bytes behind the first ``at`` of what was allocated."""
        done = 0
        for part in self._parts(ranges, at, len(data)):
            part[:] = data[done : done + len(part)]
            done += len(part)

    def read(self, ranges: Sequence[SlotRange], at: int, size: int) -> Bytes:
        """Those bytes: where they lie, if that is side by side, else a copy."""
        parts = self._parts(ranges, at, size)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Let go of it; what was read of it may still be looked at."""
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
    """A size up to where the next slab may begin."""
    return -(-size // ALIGNED) * ALIGNED


def checksum(data: Bytes) -> int:
    """Of bytes in memory: a CRC of the sums of all rows and all columns of their words, modulo 2**64.

    It is as fast as memory is read, which CRCs of the bytes are not. Any change within one word changes it, and so do
    two words that are swapped.
    """
    words = data[: len(data) // 8 * 8].view("<u8")
    whole = words[: len(words) // _ROW * _ROW].reshape(-1, _ROW)
    sums = zlib.crc32(np.add.reduce(whole, axis=1, dtype=np.uint64).data)
    sums = zlib.crc32(np.add.reduce(whole, axis=0, dtype=np.uint64).data, sums)
    return zlib.crc32(np.ascontiguousarray(data[whole.size * 8 :]).data, sums)
