"""The paged KV pool: one key and one value tensor a layer, handed out in chunks.

A run of chunks that lie side by side is read as one tensor, so the pool prefers contiguous runs. Several owners may
hold one chunk: segments that were cut from one sequence, or packed side by side. It is free again when the last of
them has given it back. Memory that was never written takes none: the operating system gives pages of an anonymous
mapping on first write, so a pool grows with use, up to its budget.
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Run:
    """Token slots ``first`` … ``first + length - 1`` of the pool, side by side."""

    first: int
    length: int

    @property
    def end(self) -> int:
        return self.first + self.length


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of keys and values in one layer, and their width."""

    kv_heads: int
    head_dim: int


class KVPool:
    """Keys and values of all layers, allocated in chunks of ``chunk_size`` token slots.

    ``keys[layer]`` and ``values[layer]`` are (kv_heads, slots, head_dim) in the KV dtype.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, capacity_bytes: int, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.dtype = dtype
        self.bytes_per_token = sum(2 * s.kv_heads * s.head_dim for s in layers) * dtype.itemsize
        self.chunks = capacity_bytes // (self.bytes_per_token * chunk_size)
        if self.chunks < 1:
            raise CapacityError(
                f"kv_memory of {capacity_bytes} bytes holds no chunk of {chunk_size} tokens at "
                f"{self.bytes_per_token} bytes a token; give at least {self.bytes_per_token * chunk_size}"
            )
        slots = self.chunks * chunk_size
        self.keys = [_untouched((s.kv_heads, slots, s.head_dim), dtype) for s in layers]
        self.values = [_untouched((s.kv_heads, slots, s.head_dim), dtype) for s in layers]
        self._free: list[tuple[int, int]] = [(0, self.chunks)]  # (first chunk, count), by first chunk
        self._free_chunks = self.chunks
        self._owners = array("i", bytes(4 * self.chunks))
        self.peak_chunks = 0  # the most that were ever held at once

    @property
    def free_chunks(self) -> int:
        return self._free_chunks

    @property
    def free_tokens(self) -> int:
        return self.free_chunks * self.chunk_size

    def chunks_for(self, tokens: int) -> int:
        """How many chunks hold that many tokens."""
        return -(-tokens // self.chunk_size)

    def allocate(self, tokens: int, *, after: Run | None = None) -> tuple[Run, ...] | None:
        """Chunks for ``tokens`` tokens as runs of slots (whole chunks), or None where the pool has too few.

        The caller is their one owner.
        after: a run at a chunk border that the new slots should continue, where that place is free.
        """
        wanted = self.chunks_for(tokens)
        if wanted > self.free_chunks:
            return None
        taken: list[tuple[int, int]] = []
        if after is not None:
            wanted -= self._take_at(after.end // self.chunk_size, wanted, taken)
        if wanted and not self._take_first_fit(wanted, taken):
            self._take_anywhere(wanted, taken)
        for first, count in taken:
            for chunk in range(first, first + count):
                self._owners[chunk] = 1
            self._free_chunks -= count
        self.peak_chunks = max(self.peak_chunks, self.chunks - self._free_chunks)
        return tuple(Run(first * self.chunk_size, count * self.chunk_size) for first, count in _join(taken))

    def share(self, runs: Iterable[Run]) -> None:
        """One more owner for every chunk that holds a slot of these runs."""
        for chunk in self.chunks_of(runs):
            assert self._owners[chunk] > 0, "a free chunk cannot be shared"
            self._owners[chunk] += 1

    def free(self, runs: Iterable[Run]) -> None:
        """One owner less for every chunk that holds a slot of these runs."""
        returned = []
        for chunk in self.chunks_of(runs):
            assert self._owners[chunk] > 0, "a chunk was freed twice"
            self._owners[chunk] -= 1
            if self._owners[chunk] == 0:
                returned.append((chunk, 1))
        if returned:
            self._free = _join(sorted([*self._free, *returned]))
            self._free_chunks += len(returned)

    def chunks_of(self, runs: Iterable[Run]) -> list[int]:
        """The chunks that hold slots of these runs, each once."""
        found: dict[int, None] = {}
        for run in runs:
            if run.length:
                found.update(dict.fromkeys(range(run.first // self.chunk_size, -(-run.end // self.chunk_size))))
        return list(found)

    def owners(self, chunk: int) -> int:
        """How many hold a chunk; 0 for a free one."""
        return self._owners[chunk]

    def write(self, layer: int, slots: Run | Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, (kv_heads, tokens, head_dim), at a run or at slot numbers (tokens,)."""
        if isinstance(slots, Run):
            self.keys[layer][:, slots.first : slots.end] = keys
            self.values[layer][:, slots.first : slots.end] = values
        else:
            self.keys[layer].index_copy_(1, slots, keys.to(self.dtype))
            self.values[layer].index_copy_(1, slots, values.to(self.dtype))

    def _take_at(self, chunk: int, wanted: int, taken: list[tuple[int, int]]) -> int:
        for index, (first, count) in enumerate(self._free):
            if first == chunk:
                return self._take(index, min(wanted, count), taken)
        return 0

    def _take_first_fit(self, wanted: int, taken: list[tuple[int, int]]) -> bool:
        for index, (_, count) in enumerate(self._free):
            if count >= wanted:
                self._take(index, wanted, taken)
                return True
        return False

    def _take_anywhere(self, wanted: int, taken: list[tuple[int, int]]) -> None:
        while wanted:
            largest = max(range(len(self._free)), key=lambda index: self._free[index][1])
            wanted -= self._take(largest, min(wanted, self._free[largest][1]), taken)

    def _take(self, index: int, wanted: int, taken: list[tuple[int, int]]) -> int:
        first, count = self._free[index]
        taken.append((first, wanted))
        self._free[index : index + 1] = [(first + wanted, count - wanted)] if count > wanted else []
        return wanted


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written; torch.zeros would touch every page.

    Zeros, since a masked slot still enters a product with weight zero, where stray NaN would survive.
    """
    size = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)


def _join(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that follow each other without a gap, keeping their order."""
    joined: list[tuple[int, int]] = []
    for first, count in spans:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return joined


def cut(runs: Sequence[Run], start: int, length: int) -> tuple[Run, ...]:
    """The slots of tokens ``start`` … ``start + length - 1`` of what is stored in ``runs``."""
    pieces: list[Run] = []
    for run in runs:
        if length <= 0:
            break
        if start < run.length:
            taken = min(run.length - start, length)
            pieces.append(Run(run.first + start, taken))
            length -= taken
            start = 0
        else:
            start -= run.length
    assert length <= 0, "a cut beyond the end of its runs"
    return tuple(pieces)
