"""Ownership of the KV pool's chunks. This is pure accounting; the memory lies elsewhere.

Attention reads adjacent chunks as one range, so the pool prefers contiguous runs. A chunk may have several owners:
segments that were cut from one sequence or packed side by side. It is free when the last owner has released it.

Ownership of the slots for recurrent states. This is pure accounting; the tensors lie elsewhere.

A stored state belongs to the end of a segment: it is the state behind the segment's last token. So the same context
digest identifies both. A state goes with its segment's last token. It may also go alone, when others need its slot: the
least recently used one goes first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush

from inlay.errors import CapacityError
from inlay.kv.segment import Segment, StoredState
from inlay.slots import SlotRange, chunks_for, chunks_of, join

#: Stale entries per live one before a bucket is rebuilt.
_STALE = 2


class FreeSpans:
    """The free chunks among 0 … ``chunks - 1``, as spans that do not touch. All chunks are free at first."""

    def __init__(self, chunks: int) -> None:
        self.chunks = 0  # in all spans
        self._ends: dict[int, int] = {}  # first chunk → end
        self._firsts: dict[int, int] = {}  # end → first chunk
        # Heaps by length, lowest first. A removed span stays in its heap until it is met or the heap is rebuilt.
        self._buckets: dict[int, list[int]] = {}
        self._live: dict[int, int] = {}  # length → number of spans
        self._lengths: list[int] = []  # the lengths in use, sorted; their sum is bounded, so they are few
        self.add(0, chunks)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def ranges(self) -> tuple[SlotRange, ...]:
        """The spans in order of position."""
        return tuple(SlotRange(first, self._ends[first] - first) for first in sorted(self._ends))

    def behind(self, chunk: int) -> int:
        """The number of adjacent free chunks from this one on."""
        return self._ends.get(chunk, chunk) - chunk

    def before(self, chunk: int) -> int:
        """The number of adjacent free chunks up to this one."""
        return chunk - self._firsts.get(chunk, chunk)

    def add(self, first: int, end: int) -> None:
        """Free chunks ``first`` … ``end - 1``."""
        self.chunks += end - first
        if first in self._firsts:
            first = self._forget(self._firsts[first])
        if end in self._ends:
            after = self._ends[end]
            self._forget(end)
            end = after
        self._note(first, end)

    def take(self, first: int, length: int) -> SlotRange:
        """Take the first ``length`` chunks of the span that begins at ``first``."""
        end = self._ends[first]
        self._forget(first)
        if first + length < end:
            self._note(first + length, end)
        self.chunks -= length
        return SlotRange(first, length)

    def smallest(self, length: int) -> int | None:
        """The first chunk of the smallest span of at least that length, the lowest of several. None if there is
        none.
        """
        at = bisect_left(self._lengths, length)
        return self._lowest(self._lengths[at]) if at < len(self._lengths) else None

    def largest(self) -> SlotRange:
        """The largest span, the lowest of several."""
        length = self._lengths[-1]
        return SlotRange(self._lowest(length), length)

    def _lowest(self, length: int) -> int:
        bucket = self._buckets[length]
        while self.behind(bucket[0]) != length:
            heappop(bucket)
        return bucket[0]

    def _note(self, first: int, end: int) -> None:
        self._ends[first], self._firsts[end] = end, first
        length = end - first
        if length not in self._live:
            insort(self._lengths, length)
            self._buckets[length], self._live[length] = [], 0
        self._live[length] += 1
        heappush(self._buckets[length], first)

    def _forget(self, first: int) -> int:
        end = self._ends.pop(first)
        del self._firsts[end]
        length = end - first
        self._live[length] -= 1
        if not self._live[length]:
            del self._live[length], self._buckets[length], self._lengths[bisect_left(self._lengths, length)]
        elif len(self._buckets[length]) > 8 + _STALE * self._live[length]:
            live = {other for other in self._buckets[length] if self.behind(other) == length}
            self._buckets[length] = sorted(live)  # a sorted list is a heap
        return first


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


#: A pool has this many slots at least: one for passes without state, one to read, one to write, one to keep.
LEAST_SLOTS = 4


class StatePool:
    """Slots for states: those of running requests, and stored ones.

    Slot 0 belongs to passes that keep no state.

    Args:
        slots: the number of slots.
        slot_bytes: the bytes of one slot.

    Attributes:
        evicted: the number of stored states that have gone to make room.
        hits, hit_tokens: the requests that continue a stored state, and the tokens in front of it, since the start.

    Raises:
        CapacityError: there are too few slots.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slots < LEAST_SLOTS:
            raise CapacityError(
                f"state_memory holds {slots} states of {slot_bytes} bytes, and a request needs up to {LEAST_SLOTS}; "
                f"give at least {LEAST_SLOTS * slot_bytes} bytes",
                code="cache.pool_too_small",
            )
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.evicted = self.hits = self.hit_tokens = 0
        self._free = list(range(slots - 1, 0, -1))
        self._stored: OrderedDict[StoredState, None] = OrderedDict()  # least recently used first

    @property
    def stored(self) -> int:
        """The number of stored states."""
        return len(self._stored)

    @property
    def free_slots(self) -> int:
        """The number of slots that hold nothing."""
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """The number of slots of running requests and stored states."""
        return self.slots - 1 - len(self._free)

    def hit(self, tokens: int) -> None:
        """Count a request that continues the state behind its first ``tokens`` tokens."""
        self.hits += 1
        self.hit_tokens += tokens

    def allocate(self) -> int | None:
        """Return a slot, of an evicted state if no slot is free. Returns None if requests use all slots."""
        if not self._free:
            oldest = next((state for state in self._stored if not state.readers), None)
            if oldest is None or oldest.segment is None:
                return None
            self.evicted += 1
            self.drop(oldest.segment)
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Take back a slot that holds no stored state."""
        assert slot not in self._free, "a state slot was freed twice"
        self._free.append(slot)

    def keep(self, segment: Segment, slot: int) -> StoredState | None:
        """Store a slot as the state behind a segment.

        Returns None, and frees the slot, if the segment has a state already. That one then counts as used.
        """
        if segment.state is not None:
            self.free(slot)
            self._stored.move_to_end(segment.state)
            return None
        state = StoredState(slot, None)
        self.adopt(segment, state)
        return state

    def new(self) -> StoredState | None:
        """Return a state that no segment has yet, acquired once. None if requests use all slots."""
        slot = self.allocate()
        return None if slot is None else StoredState(slot, None, readers=1)

    def adopt(self, segment: Segment, state: StoredState) -> None:
        """Store a state as the one behind a segment. Does nothing if the segment has one already."""
        if segment.state is None:
            segment.state, state.segment = state, segment
            self._stored[state] = None

    def move(self, state: StoredState, segment: Segment) -> None:
        """Give a state to the segment that ends where its former segment ended."""
        assert state.segment is not None, "a dropped state belongs to no segment"
        state.segment.state, state.segment, segment.state = None, segment, state

    def drop(self, segment: Segment) -> None:
        """Forget the state behind a segment, if it has one. Its slot is free once no request reads it."""
        state = segment.state
        if state is None:
            return
        segment.state = state.segment = None
        del self._stored[state]
        if not state.readers:
            self.free(state.slot)

    def acquire(self, state: StoredState) -> None:
        """Keep a state from eviction until it is released. This counts as a use."""
        state.readers += 1
        if state.segment is not None:
            self._stored.move_to_end(state)

    def release(self, state: StoredState) -> None:
        """Let a state go after ``acquire``."""
        state.readers -= 1
        if not state.readers and state.segment is None:
            self.free(state.slot)
