"""Who owns which chunk of the KV pool: pure accounting, of which the memory itself knows nothing.

A run of chunks that lie side by side is read as one range, so the pool prefers contiguous runs. Several owners may
hold one chunk: segments that were cut from one sequence, or packed side by side. It is free again when the last of
them has given it back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from inlay.errors import CapacityError
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
        self._free: list[SlotRange] = [SlotRange(0, self.chunks)]  # of chunks, not slots; by first chunk
        self._free_chunks = self.chunks
        self._owners = array("i", bytes(4 * self.chunks))
        self.peak_chunks = 0  # the most that were ever held at once

    @property
    def slots(self) -> int:
        """How many slots all chunks hold."""
        return self.chunks * self.chunk_size

    @property
    def free_chunks(self) -> int:
        return self._free_chunks

    @property
    def free_ranges(self) -> tuple[SlotRange, ...]:
        """The free chunks, by number; of chunks, not of slots."""
        return tuple(self._free)

    @property
    def free_tokens(self) -> int:
        return self.free_chunks * self.chunk_size

    def chunks_for(self, tokens: int) -> int:
        """How many chunks hold that many tokens."""
        return chunks_for(tokens, self.chunk_size)

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
        if wanted and not self._take_first_fit(wanted, taken):
            self._take_anywhere(wanted, taken)
        for chunks in taken:
            for chunk in range(chunks.first, chunks.end):
                self._owners[chunk] = 1
            self._free_chunks -= chunks.length
        self.peak_chunks = max(self.peak_chunks, self.chunks - self._free_chunks)
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
        if returned:
            self._free = list(join(sorted([*self._free, *returned], key=lambda chunks: chunks.first)))
            self._free_chunks += len(returned)

    def owners(self, chunk: int) -> int:
        """How many hold a chunk; 0 for a free one."""
        return self._owners[chunk]

    def _take_at(self, chunk: int, wanted: int, taken: list[SlotRange]) -> int:
        for index, free in enumerate(self._free):
            if free.first == chunk:
                return self._take(index, min(wanted, free.length), taken)
        return 0

    def _take_first_fit(self, wanted: int, taken: list[SlotRange]) -> bool:
        for index, free in enumerate(self._free):
            if free.length >= wanted:
                self._take(index, wanted, taken)
                return True
        return False

    def _take_anywhere(self, wanted: int, taken: list[SlotRange]) -> None:
        while wanted:
            largest = max(range(len(self._free)), key=lambda index: self._free[index].length)
            wanted -= self._take(largest, min(wanted, self._free[largest].length), taken)

    def _take(self, index: int, wanted: int, taken: list[SlotRange]) -> int:
        free = self._free[index]
        taken.append(SlotRange(free.first, wanted))
        rest = SlotRange(free.first + wanted, free.length - wanted)
        self._free[index : index + 1] = [rest] if rest.length else []
        return wanted
