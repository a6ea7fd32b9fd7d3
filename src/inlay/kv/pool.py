"""Ownership of the KV pool's chunks. This is pure accounting; the memory lies elsewhere.

Attention reads adjacent chunks as one range, so the pool prefers contiguous runs. A chunk may have several owners:
segments that were cut from one sequence or packed side by side. It is free when the last owner has released it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from inlay.errors import CapacityError
from inlay.kv.spans import FreeSpans
from inlay.slots import SlotRange, chunks_for, chunks_of, join


class KVPool:
    """Chunks of ``chunk_size`` token slots, as many as fit into ``capacity_bytes``.

    Args:
        bytes_per_token: size of the KV of all layers.

    Raises:
        CapacityError: not even one chunk fits.
    """

    def __init__(self, capacity_bytes: int, bytes_per_token: int, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.bytes_per_token = bytes_per_token
        self.chunks = capacity_bytes // (bytes_per_token * chunk_size)
        if self.chunks < 1:
            raise CapacityError(
                f"kv_memory of {capacity_bytes} bytes holds no chunk of {chunk_size} tokens at "
                f"{bytes_per_token} bytes a token; give at least {bytes_per_token * chunk_size}",
                code="cache.pool_too_small",
            )
        self._free = FreeSpans(self.chunks)
        self._owners = array("i", bytes(4 * self.chunks))
        self.peak_chunks = 0  # the most that were in use at once

    @property
    def slots(self) -> int:
        """The number of slots in all chunks."""
        return self.chunks * self.chunk_size

    @property
    def free_chunks(self) -> int:
        return self._free.chunks

    @property
    def free_ranges(self) -> tuple[SlotRange, ...]:
        """The free chunks, by number. The ranges count chunks, not slots."""
        return self._free.ranges

    @property
    def free_tokens(self) -> int:
        return self.free_chunks * self.chunk_size

    def chunks_for(self, tokens: int) -> int:
        """The number of chunks for that many tokens."""
        return chunks_for(tokens, self.chunk_size)

    def mib_for(self, tokens: int) -> int:
        """MiB for that many tokens in whole chunks, rounded up; used in error messages."""
        return -(-self.chunks_for(tokens) * self.chunk_size * self.bytes_per_token // 2**20)

    def chunks_of(self, ranges: Iterable[SlotRange]) -> list[int]:
        """The chunks that contain slots of these ranges, each once."""
        return chunks_of(ranges, self.chunk_size)

    def allocate(self, tokens: int, *, after: SlotRange | None = None) -> tuple[SlotRange, ...] | None:
        """Allocate whole chunks for ``tokens`` tokens, with the caller as their only owner.

        Args:
            after: a range that ends at a chunk border. The new slots continue it if the next chunk is free.

        Returns:
            Ranges of slots, or None if the pool has too few chunks.
        """
        wanted = self.chunks_for(tokens)
        if wanted > self.free_chunks:
            return None
        taken: list[SlotRange] = []
        if after is not None:
            wanted -= self._take_at(after.end // self.chunk_size, wanted, taken)
        while wanted:
            wanted -= self._take_best(wanted, taken)
        for chunks in taken:
            for chunk in range(chunks.first, chunks.end):
                self._owners[chunk] = 1
        self.peak_chunks = max(self.peak_chunks, self.chunks - self.free_chunks)
        return tuple(SlotRange(c.first * self.chunk_size, c.length * self.chunk_size) for c in join(taken))

    def share(self, ranges: Iterable[SlotRange]) -> None:
        """Add an owner to every chunk that contains a slot of these ranges."""
        for chunk in self.chunks_of(ranges):
            assert self._owners[chunk] > 0, "a free chunk cannot be shared"
            self._owners[chunk] += 1

    def free(self, ranges: Iterable[SlotRange]) -> None:
        """Remove an owner from every chunk that contains a slot of these ranges."""
        returned = []
        for chunk in self.chunks_of(ranges):
            assert self._owners[chunk] > 0, "a chunk was freed twice"
            self._owners[chunk] -= 1
            if self._owners[chunk] == 0:
                returned.append(SlotRange(chunk, 1))
        for chunks in join(returned):
            self._free.add(chunks.first, chunks.end)

    def owners(self, chunk: int) -> int:
        """The number of owners of a chunk; 0 if it is free."""
        return self._owners[chunk]

    def free_beside(self, first: int, end: int) -> int:
        """The number of free chunks directly before and behind chunks ``first`` … ``end - 1``."""
        return self._free.before(first) + self._free.behind(end)

    def _take_at(self, chunk: int, wanted: int, taken: list[SlotRange]) -> int:
        length = min(wanted, self._free.behind(chunk))
        if length:
            taken.append(self._free.take(chunk, length))
        return length

    def _take_best(self, wanted: int, taken: list[SlotRange]) -> int:
        """Take from the smallest span that fits, to keep large ones whole; if none fits, from the largest."""
        fitting = self._free.smallest(wanted)
        best = self._free.largest() if fitting is None else SlotRange(fitting, wanted)
        taken.append(self._free.take(best.first, best.length))
        return best.length
