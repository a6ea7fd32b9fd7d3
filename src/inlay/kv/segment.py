"""Stored segments: where their KV lies, which ranges are read, and which references keep them."""

from __future__ import annotations

from dataclasses import dataclass, field

from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun
from inlay.kv.policies import Use
from inlay.slots import SlotRange, cut


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
        evicted: True if it goes with its last reference. New requests do not find it.
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
        """Tokens ``first`` … ``end - 1`` of these."""
        return SegmentRange(self.segment, self.first + first, self.first + end)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix match: consecutive tokens of a run, as ranges of stored segments.

    It describes the store at the time of the lookup. Acquire a hold to read it later.
    """

    ranges: tuple[SegmentRange, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens found."""
        return sum(each.tokens for each in self.ranges)

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
        """Tokens ``first`` … ``end - 1`` of these, or as many of them as were found."""
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
