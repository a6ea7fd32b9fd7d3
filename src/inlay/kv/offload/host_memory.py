"""The memory of the host tier: one block, divided into pages, with a segment's slabs one behind another.

The block is allocated once, at the start. Locking memory for device copies takes long and stalls the device. Without
locking, pages take no physical memory before they are written.
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
