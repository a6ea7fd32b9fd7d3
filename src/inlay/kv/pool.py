"""Segments, and the ownership of the KV pool's chunks and of the slots for recurrent states. This is pure accounting;
the memory lies elsewhere.

Attention reads adjacent chunks as one range, so the pool prefers contiguous runs. A chunk may have several owners:
segments that were cut from one sequence or packed side by side. It is free when the last owner has released it.

A stored state belongs to the end of a segment: it is the state behind the segment's last token. So the same context
digest identifies both. A state is dropped with its segment's last token. It may also be evicted alone, when others need
its slot: the least recently used state first.

A ``Segment`` knows where its KV lies, which ranges are read, and which references keep it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from inlay.errors import CapacityError
from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun
from inlay.kv.policies import Use
from inlay.slots import SlotRange, chunks_for, chunks_of, cut, join

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
        """Return the first chunk of the smallest span of at least this length. None without such a span.

        Of several spans, the lowest is taken.
        """
        at = bisect_left(self._lengths, length)
        return self._lowest(self._lengths[at]) if at < len(self._lengths) else None

    def largest(self) -> SlotRange:
        """Return the largest span; of several, the lowest."""
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

        If the segment has a state already, this counts as a use of that state. Then returns None and frees the slot.
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
        """Store a state behind a segment. Does nothing if the segment has a state already."""
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
        """End a reference that ``acquire`` has made. The state may then be evicted."""
        state.readers -= 1
        if not state.readers and state.segment is None:
            self.free(state.slot)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request's text.

    Attributes:
        salt: the cache salt of the request; "" for none.
        modules: keys of the segments that the text contains or follows.
        movable: True if later requests may find the text behind other text, by its content.
    """

    salt: str
    modules: frozenset[bytes] = frozenset()
    movable: bool = False

    def __or__(self, other: Origin) -> Origin:
        if other.modules <= self.modules and other.movable <= self.movable:
            return self
        return Origin(self.salt, self.modules | other.modules, self.movable or other.movable)


@dataclass(eq=False, slots=True)
class StoredState:
    """The state behind a segment's last token. It never changes.

    Attributes:
        slot: its slot.
        segment: its segment. None before it is stored, and once it is dropped while requests still read it.
        readers: the number of requests that read it.
    """

    slot: int
    segment: Segment | None
    readers: int = 0


@dataclass(eq=False, slots=True)
class Segment:
    """An immutable run of tokens with their KV in the pool.

    Attributes:
        run: its tokens, as they were encoded.
        place: its index node.
        slots: its KV, one slot a token. Neighbours may share chunks.
        keys: names the nodes.
        holds: the references to it or to a prefix of it.
        specs: by key, the modules that overlap it and are stored whole.
        parts: by key, all modules that it holds tokens of, stored whole or not.
        origin: the owner of its text, and the modules that the text contains or follows.
        evicted: True if it is removed with its last reference. New requests do not find it.
        state: the recurrent state behind its last token. None if none is stored.
        use, listed: its use, and its entry in the eviction queue; see policies.py.
    """

    run: TokenRun
    place: bytes
    slots: tuple[SlotRange, ...]
    keys: KeyMaker
    use: Use
    holds: set[Hold] = field(default_factory=set)
    specs: dict[bytes, SegmentSpec] = field(default_factory=dict)
    parts: dict[bytes, SegmentSpec] = field(default_factory=dict)
    origin: Origin | None = None
    evicted: bool = False
    listed: int | None = None
    state: StoredState | None = None
    _behind: tuple[int, bytes] | None = None  # (tokens at that time, node behind them)

    @property
    def tokens(self) -> int:
        return len(self.run.ids)

    @property
    def module(self) -> bool:
        """True if it was stored as a module, which is read whole. Other text may be read up to any token."""
        return self.use.module

    @property
    def held(self) -> int:
        """The length of the longest prefix that has a reference."""
        return max((hold.tokens[self] for hold in self.holds), default=0)

    @property
    def behind(self) -> bytes:
        """The index node behind its last token. Computed on demand, because it hashes all tokens."""
        if self._behind is None or self._behind[0] != self.tokens:
            # This uses the segment's own positions, which may differ from the reader's. Where shifts are allowed, a
            # node depends on distances only.
            rest = self.run.rest(self.tokens)
            self._behind = self.tokens, self.keys.place(rest.digest, rest.start)
        return self._behind[1]


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Tokens ``first`` … ``end - 1`` of a stored segment, counted from its first one."""

    segment: Segment
    first: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.first

    @property
    def start(self) -> int:
        """The position at which its first token was encoded."""
        return self.segment.run.start + self.first

    @property
    def slots(self) -> tuple[SlotRange, ...]:
        return cut(self.segment.slots, self.first, self.tokens)

    def part(self, first: int, end: int) -> SegmentRange:
        """Return tokens ``first`` … ``end - 1`` of this range."""
        return SegmentRange(self.segment, self.first + first, self.first + end)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix match: consecutive tokens of a run, as ranges of stored segments.

    It describes the store at the time of the lookup. Acquire a hold to read it later.
    """

    ranges: tuple[SegmentRange, ...]
    tokens: int = field(init=False, compare=False)  #: The number of tokens found.

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", sum([each.tokens for each in self.ranges]))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(each.segment for each in self.ranges)

    @property
    def slots(self) -> tuple[SlotRange, ...]:
        """The slots of all ranges."""
        return tuple(run for each in self.ranges for run in each.slots)

    @property
    def state(self) -> StoredState | None:
        """The recurrent state behind its last token. None if none is stored."""
        return self.ranges[-1].segment.state if self.ranges and not self.ends_within else None

    def to_state(self) -> PrefixMatch:
        """The longest prefix of the match with a recurrent state behind its last token."""
        for number in range(len(self.ranges), 0, -1):
            found = PrefixMatch(self.ranges[:number])
            if found.state is not None:
                return found
        return PrefixMatch(())

    @property
    def ends_within(self) -> bool:
        """True if the last segment continues behind the match."""
        return bool(self.ranges) and self.ranges[-1].end < self.ranges[-1].segment.tokens

    def part(self, first: int, end: int) -> PrefixMatch:
        """Return tokens ``first`` … ``end - 1`` of this match, or as many of them as it has."""
        ranges, at = [], 0
        for each in self.ranges:
            begin, stop = max(first - at, 0), min(end - at, each.tokens)
            if begin < stop:
                ranges.append(each.part(begin, stop))
            at += each.tokens
        return PrefixMatch(tuple(ranges))


@dataclass(eq=False, slots=True)
class Hold:
    """A reference to prefixes of segments, which stay until it is released.

    Attributes:
        tokens: the referenced length of each segment. If a segment is cut in two, the reference covers both parts.
    """

    tokens: dict[Segment, int] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        return list(self.tokens)

    def slots(self) -> list[tuple[SlotRange, ...]]:
        """The referenced slots, by segment. Thread-safe: a segment that is cut meanwhile appears either whole or
        cut.
        """
        return [_beginning(segment.slots, tokens) for segment, tokens in list(self.tokens.items())]

    def add(self, segment: Segment, tokens: int) -> None:
        """Acquire the first ``tokens`` tokens of a segment. A longer reference stays."""
        segment.holds.add(self)
        self.tokens[segment] = max(tokens, self.tokens.get(segment, 0))

    def shorten(self, segment: Segment, tokens: int) -> int:
        """Reference at most ``tokens`` tokens of a segment. Returns by how many tokens the reference shrank."""
        more = max(0, self.tokens[segment] - tokens)
        self.tokens[segment] -= more
        return more

    def release(self) -> None:
        for segment in self.tokens:
            segment.holds.discard(self)
        self.tokens.clear()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _beginning(slots: tuple[SlotRange, ...], tokens: int) -> tuple[SlotRange, ...]:
    return cut(slots, 0, min(tokens, sum(run.length for run in slots)))
