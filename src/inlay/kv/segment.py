"""Stored segments: where their keys and values lie, which ranges of them are read, and who needs them to stay."""

from __future__ import annotations

from dataclasses import dataclass, field

from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun
from inlay.kv.policies import Use
from inlay.slots import SlotRange, cut


@dataclass(frozen=True, slots=True)
class Origin:
    """Where text of a request comes from.

    salt: the cache salt of the request; "" for none. modules: keys of the segments that the text contains or follows.
    """

    salt: str
    modules: frozenset[bytes] = frozenset()

    def __or__(self, other: Origin) -> Origin:
        return self if other.modules <= self.modules else Origin(self.salt, self.modules | other.modules)


@dataclass(eq=False, slots=True)
class Segment:
    """An immutable run of tokens with their KV in the pool.

    run: its tokens, as they were encoded.
    place: where the index keeps it.
    slots: where its KV lies, one slot a token; chunks may be shared with its neighbours.
    keys: what names places.
    holds: who needs it, or its beginning, to stay.
    specs: the modules that it holds, or a part of, by key, while the whole of them is stored.
    parts: all modules that it holds tokens of, by key, whether or not the rest of them is stored.
    origin: whose text it is, and which modules that text contains or follows.
    evicted: whether it goes when its last hold is released; new requests do not find it.
    use, listed: how it was used, and its entry in the order of eviction; see use_order.py.
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
    _behind: tuple[int, bytes] | None = None  # as many tokens as it had then, and the place behind them

    @property
    def tokens(self) -> int:
        return len(self.run.ids)

    @property
    def module(self) -> bool:
        """Whether it was stored as a module, which is asked for whole; else any beginning of it may be."""
        return self.use.module

    @property
    def held(self) -> int:
        """How many of its tokens, from the first on, somebody needs to stay."""
        return max((hold.tokens[self] for hold in self.holds), default=0)

    @property
    def behind(self) -> bytes:
        """Where the index keeps what may follow its last token. Worked out when it is asked for: it hashes them all."""
        if self._behind is None or self._behind[0] != self.tokens:
            # What follows is named in the segment's own positions, which may be others than those of who reads it:
            # where segments may be read at a shift, a place knows distances alone.
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
        """The position that its first token was encoded at."""
        return self.segment.run.start + self.first

    @property
    def slots(self) -> tuple[SlotRange, ...]:
        return cut(self.segment.slots, self.first, self.tokens)

    def part(self, first: int, end: int) -> SegmentRange:
        """Tokens ``first`` … ``end - 1`` of these."""
        return SegmentRange(self.segment, self.first + first, self.first + end)


@dataclass(frozen=True, slots=True)
class Found:
    """What is stored of a run: tokens that follow each other, as ranges of segments.

    It tells of the store as it was when it was asked; a hold keeps it so that it can be read later.
    """

    ranges: tuple[SegmentRange, ...]

    @property
    def tokens(self) -> int:
        """How many tokens were found."""
        return sum(each.tokens for each in self.ranges)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(each.segment for each in self.ranges)

    @property
    def slots(self) -> tuple[SlotRange, ...]:
        """Where what was found lies."""
        return tuple(run for each in self.ranges for run in each.slots)

    @property
    def ends_within(self) -> bool:
        """Whether the last segment goes on behind what was found of it."""
        return bool(self.ranges) and self.ranges[-1].end < self.ranges[-1].segment.tokens

    def part(self, first: int, end: int) -> Found:
        """Tokens ``first`` … ``end - 1`` of these, or as many of them as were found."""
        ranges, at = [], 0
        for each in self.ranges:
            begin, stop = max(first - at, 0), min(end - at, each.tokens)
            if begin < stop:
                ranges.append(each.part(begin, stop))
            at += each.tokens
        return Found(tuple(ranges))


@dataclass(eq=False, slots=True)
class Hold:
    """Beginnings of segments that must stay until this is released, as far as they are read.

    tokens: of each segment, how many. One that is cut in two is held in both parts, as far as that goes.
    """

    tokens: dict[Segment, int] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        return list(self.tokens)

    def slots(self) -> list[tuple[SlotRange, ...]]:
        """Where what is held lies. May be asked from any thread: what is cut meanwhile is as it was or as it is."""
        return [_beginning(segment.slots, tokens) for segment, tokens in list(self.tokens.items())]

    def add(self, segment: Segment, tokens: int) -> None:
        """Hold the first ``tokens`` tokens of a segment, or more where more of it is held already."""
        segment.holds.add(self)
        self.tokens[segment] = max(tokens, self.tokens.get(segment, 0))

    def shorten(self, segment: Segment, tokens: int) -> int:
        """Hold no more than that many tokens of a segment; returns how many more were held."""
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
