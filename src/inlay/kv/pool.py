"""Who owns which chunk of the KV pool: pure accounting, of which the memory itself knows nothing.

A run of chunks that lie side by side is read as one range, so the pool prefers contiguous runs. Several owners may
hold one chunk: segments that were cut from one sequence, or packed side by side. It is free again when the last of
them has given it back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from inlay.errors import CapacityError
from inlay.kv.spans import FreeSpans
from inlay.slots import SlotRange, chunks_for, chunks_of, join


class KVPool:
    """Chunks of ``chunk_size`` token slots, as many as ``capacity_bytes`` hold. Raises CapacityError for none.

    bytes_per_token: of the keys and values of all layers.
    """

    def __init__(self, capacity_bytes: int, bytes_per_token: int, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.bytes_per_token = bytes_per_token
        self.chunks = capacity_bytes // (bytes_per_token * chunk_size)
        if self.chunks < 1:
            raise CapacityError(
                f"kv_memory of {capacity_bytes} bytes holds no chunk of {chunk_size} tokens at "
                f"{bytes_per_token} bytes a token; give at least {bytes_per_token * chunk_size}"
            )
        self._free = FreeSpans(self.chunks)
        self._owners = array("i", bytes(4 * self.chunks))
        self.peak_chunks = 0  # the most that were ever held at once

    @property
    def slots(self) -> int:
        """How many slots all chunks hold."""
        return self.chunks * self.chunk_size

    @property
    def free_chunks(self) -> int:
        return self._free.chunks

    @property
    def free_ranges(self) -> tuple[SlotRange, ...]:
        """The free chunks, by number; of chunks, not of slots."""
        return self._free.ranges

    @property
    def free_tokens(self) -> int:
        return self.free_chunks * self.chunk_size

    def chunks_for(self, tokens: int) -> int:
        """How many chunks hold that many tokens."""
        return chunks_for(tokens, self.chunk_size)

    def mib_for(self, tokens: int) -> int:
        """How many MiB that many tokens take in whole chunks, rounded up: what a message may tell somebody to give."""
        return -(-self.chunks_for(tokens) * self.chunk_size * self.bytes_per_token // 2**20)

    def chunks_of(self, ranges: Iterable[SlotRange]) -> list[int]:
        """The chunks that hold slots of these ranges, each once."""
        return chunks_of(ranges, self.chunk_size)

    def allocate(self, tokens: int, *, after: SlotRange | None = None) -> tuple[SlotRange, ...] | None:
        """Chunks for ``tokens`` tokens as ranges of slots (whole chunks), or None where the pool has too few.

        The caller is their one owner.
        after: a range at a chunk border that the new slots should continue, where that place is free.
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
        """One more owner for every chunk that holds a slot of these ranges."""
        for chunk in self.chunks_of(ranges):
            assert self._owners[chunk] > 0, "a free chunk cannot be shared"
            self._owners[chunk] += 1

    def free(self, ranges: Iterable[SlotRange]) -> None:
        """One owner less for every chunk that holds a slot of these ranges."""
        returned = []
        for chunk in self.chunks_of(ranges):
            assert self._owners[chunk] > 0, "a chunk was freed twice"
            self._owners[chunk] -= 1
            if self._owners[chunk] == 0:
                returned.append(SlotRange(chunk, 1))
        for chunks in join(returned):
            self._free.add(chunks.first, chunks.end)

    def owners(self, chunk: int) -> int:
        """How many hold a chunk; 0 for a free one."""
        return self._owners[chunk]

    def free_beside(self, first: int, end: int) -> int:
        """How many free chunks lie right before and behind chunks ``first`` … ``end - 1``."""
        return self._free.before(first) + self._free.behind(end)

    def _take_at(self, chunk: int, wanted: int, taken: list[SlotRange]) -> int:
        length = min(wanted, self._free.behind(chunk))
        if length:
            taken.append(self._free.take(chunk, length))
        return length

    def _take_best(self, wanted: int, taken: list[SlotRange]) -> int:
        """The smallest span that is large enough, so that large ones stay; where there is none, the largest."""
        fitting = self._free.smallest(wanted)
        best = self._free.largest() if fitting is None else SlotRange(fitting, wanted)
        taken.append(self._free.take(best.first, best.length))
        return best.length
