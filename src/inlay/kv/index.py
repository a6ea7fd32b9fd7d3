"""The prefix index: every stored segment, found by what it could attend to and then token by token.

This is the prefix tree of ChunkAttention (arXiv 2402.15220, section 3.1) with context digests for edges: a segment is
kept at the *place* that its context digest names, under its first token, and what may follow it is kept at the place
that the digest behind its last token names. So prompts that begin alike share a path from the root with no hint from
anybody; modules encoded alone begin at the root too; and what follows a splice of modules is kept at the place that
this splice names, which no prompt with other text before it can reach. Nothing points from one segment to another:
a place is a digest, so a part of a path may be evicted and computed anew while the rest stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun
from inlay.kv.policies import PassCost, Policy, Use, lru
from inlay.kv.pool import KVPool
from inlay.kv.segment import Found, Origin, Segment, SegmentRange
from inlay.kv.use_order import UseOrder
from inlay.slots import SlotRange, cut

_FEW = 32  # tokens that are compared first: most that differ do so among these


class IndexListener(Protocol):
    """Hears what an index finds and what it finds no more. It must be quick and must not raise."""

    def added(self, segment: Segment) -> None: ...

    def removed(self, segment: Segment) -> None: ...


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far somebody has come in what is stored: ``tokens`` into a segment, or to a place where one may begin.

    It tells of the store as it was; whoever changes it has to begin anew.
    """

    place: bytes
    segment: Segment | None = None
    tokens: int = 0


class PrefixIndex:
    """Segments by place and first token. The index owns a share of every chunk that its segments lie in.

    listener: is told of every change from now on; None for nobody. policy, cost: in which order they go; see
    policies.py.
    """

    def __init__(self, pool: KVPool, keys: KeyMaker, policy: Policy = lru, cost: PassCost | None = None) -> None:
        self._pool = pool
        self._keys = keys
        self._places: dict[bytes, dict[int, Segment]] = {}
        self.by_use: UseOrder[Segment] = UseOrder(policy, cost or PassCost(), self.behind)
        self.listener: IndexListener | None = None
        self.segments = 0
        self.tokens = 0  # of all segments
        self.evicted: set[Segment] = set()  # held segments that go when their last hold is released

    def __iter__(self) -> Iterator[Segment]:
        return (segment for branches in self._places.values() for segment in branches.values())

    def place(self, run: TokenRun) -> bytes:
        """The place of a run; what is stored of its beginning is kept there, under its first token."""
        return self._keys.place(run.digest, run.start)

    def longest(self, run: TokenRun, *, most: int | None = None, touch: bool = True) -> Found:
        """The longest stored beginning of a run, of at most ``most`` tokens. Token ids are compared one by one.

        touch: whether that counts as having been asked for.
        """
        most = len(run.ids) if most is None else min(most, len(run.ids))
        ranges: list[SegmentRange] = []
        at, place = 0, self.place(run)
        while at < most:
            segment = self._places.get(place, {}).get(run.ids[at])
            if segment is None:
                break
            common = shared_length(segment.run.ids, run.ids, at, most)
            ranges.append(SegmentRange(segment, 0, common))
            at += common
            if common < segment.tokens:
                break
            place = segment.behind
        if touch:
            self._touch(each.segment for each in ranges)
        return Found(tuple(ranges))

    def cursor(self, run: TokenRun) -> Cursor:
        """The start of a run, from which ``follow`` goes on."""
        return Cursor(self.place(run))

    def follow(self, cursor: Cursor, ids: Sequence[int]) -> tuple[int, Cursor]:
        """How many of the next tokens are stored behind a cursor, and where one is behind these.

        It is no use: what is only compared is evicted as if nobody had looked.
        """
        place, segment, into, at = cursor.place, cursor.segment, cursor.tokens, 0
        while at < len(ids):
            if segment is None:
                segment, into = self._places.get(place, {}).get(ids[at]), 0
                if segment is None:
                    break
            stored = segment.run.ids
            length = min(len(stored) - into, len(ids) - at)
            few = min(length, _FEW)
            common = shared_length(stored[into : into + few], ids, at, at + few)
            if common == few < length:
                common += shared_length(stored[into + few : into + length], ids, at + few, at + length)
            at, into = at + common, into + common
            if into < len(stored):
                break
            place, segment, into = segment.behind, None, 0
        return at, Cursor(place, segment, into)

    def insert(
        self, run: TokenRun, slots: Sequence[SlotRange], *, returns: bool = False, origin: Origin | None = None
    ) -> Found:
        """Keep the KV of a run, which lies in ``slots``, as far as it is not kept yet; returns what is kept of it now.

        That is all of it, but where two held segments stand in each other's way; see ``_cut``.
        returns: whether it comes back from a lower tier, which is no use of it. origin: see Segment.
        """
        found = self.longest(run)
        while found.tokens < len(run.ids) and found.ends_within:
            # It agrees with a segment up to some token and no further: that one is cut in two there.
            if not self._cut(found.ranges[-1].segment, found.ranges[-1].end):
                return found
            found = self.longest(run)  # something may have stood behind the cut already
        if found.tokens < len(run.ids):
            rest = run.rest(found.tokens)
            own = cut(slots, found.tokens, len(rest.ids))
            new = self._add(rest, own, module=isinstance(run, SegmentSpec), returns=returns)
            self._touch(found.segments)
            found = Found((*found.ranges, SegmentRange(new, 0, new.tokens)))
        for segment in found.segments:
            if isinstance(run, SegmentSpec):
                segment.specs[run.key] = segment.parts[run.key] = run
            elif origin is not None:
                segment.origin = origin if segment.origin is None else segment.origin | origin
        return found

    def shorten(self, segment: Segment, tokens: int) -> None:
        """Forget a segment behind its first ``tokens`` tokens, of which nothing is held, and give those chunks back."""
        assert segment.held <= tokens, "what is held cannot be forgotten"
        if tokens == 0:
            self.remove(segment)
        elif tokens < segment.tokens:
            self._forget_modules(segment, segment.run.before.tokens + tokens)
            self.tokens -= segment.tokens - tokens
            self._keep_beginning(segment, tokens)

    def remove(self, segment: Segment) -> None:
        """Forget a segment that nobody holds, and give its chunks back."""
        assert not segment.holds, "a held segment cannot be removed"
        self.evicted.discard(segment)
        self._forget_modules(segment, segment.run.before.tokens)
        branches = self._places[segment.place]
        del branches[segment.run.ids[0]]
        if not branches:
            del self._places[segment.place]
        self.by_use.remove(segment, (segment.place, segment.run.ids[0]))
        if self.listener is not None:
            self.listener.removed(segment)
        self.segments -= 1
        self.tokens -= segment.tokens
        self._pool.free(segment.slots)

    def _forget_modules(self, segment: Segment, end: int) -> None:
        """Note that modules which go on behind token ``end`` of all are no longer whole."""
        for key, spec in list(segment.specs.items()):
            if _end(spec) > end:
                del segment.specs[key]
                for other in self.longest(spec, touch=False).segments:
                    other.specs.pop(key, None)

    def _cut(self, segment: Segment, tokens: int) -> bool:
        """Cut a segment in two, the first part of that many tokens. Everyone who held it holds both, as far as before.

        Something that begins like the second part may stand at its place already: a module there may have been stored
        when this segment's beginning was not. It gives way, unless it is held: then nothing is cut, and False returned.
        """
        rest = segment.run.rest(tokens)
        other = self._places.get(self.place(rest), {}).get(rest.ids[0])
        if other is not None:
            if other.holds:
                return False
            self.remove(other)
        slots = cut(segment.slots, tokens, len(rest.ids))
        behind = self._add(rest, slots, module=segment.module, part_of=segment)
        end = rest.before.tokens
        behind.specs.update({key: spec for key, spec in segment.specs.items() if _end(spec) > end})
        behind.parts.update({key: spec for key, spec in segment.parts.items() if _end(spec) > end})
        behind.origin, behind.evicted = segment.origin, segment.evicted
        if segment.evicted:
            self.evicted.add(behind)
        self.tokens -= len(rest.ids)
        self._keep_beginning(segment, tokens)
        for hold in segment.holds:
            more = hold.shorten(segment, tokens)
            if more:
                hold.add(behind, more)
        return True

    def _keep_beginning(self, segment: Segment, tokens: int) -> None:
        """Make a segment end behind that many tokens; the index owns the chunks of the others no more, for its part."""
        if self.listener is not None:
            self.listener.removed(segment)
        kept, gone = cut(segment.slots, 0, tokens), cut(segment.slots, tokens, segment.tokens - tokens)
        border = kept[-1].end - 1
        self._pool.free(_without(gone, border // self._pool.chunk_size, self._pool.chunk_size))
        segment.run, segment.slots = segment.run.beginning(tokens), kept
        if self.listener is not None:
            self.listener.added(segment)

    def _add(
        self,
        run: TokenRun,
        slots: tuple[SlotRange, ...],
        *,
        module: bool,
        part_of: Segment | None = None,
        returns: bool = False,
    ) -> Segment:
        """part_of: the segment that the new one was the end of; None for one that is used, or returns, now."""
        use = Use(len(run.ids), run.before.tokens, module)
        segment = Segment(run, self.place(run), slots, self._keys, use)
        if part_of is None:
            self.by_use.add(segment, (segment.place, run.ids[0]), returns=returns)
        else:
            self.by_use.add_behind(segment, part_of)
        self._places.setdefault(segment.place, {})[run.ids[0]] = segment
        self.segments += 1
        self.tokens += segment.tokens
        self._pool.share(slots)
        if self.listener is not None:
            self.listener.added(segment)
        return segment

    def behind(self, segment: Segment) -> Iterable[Segment]:
        """What may be found only through a segment."""
        return self._places.get(segment.behind, {}).values()

    def _touch(self, segments: Iterable[Segment]) -> None:
        """Note a use. The first of a path counts as used last, so that a path loses its end before its beginning."""
        for segment in reversed(list(segments)):
            self.by_use.touch(segment)


def _end(spec: SegmentSpec) -> int:
    """How many tokens there are up to the last one of a module, with all that it attends to."""
    return spec.before.tokens + len(spec.ids)


def _without(runs: Sequence[SlotRange], chunk: int, size: int) -> list[SlotRange]:
    """Runs without their slots in one chunk."""
    first, end = chunk * size, (chunk + 1) * size
    return [
        SlotRange(start, stop - start)
        for run in runs
        for start, stop in ((run.first, min(run.end, first)), (max(run.first, end), run.end))
        if start < stop
    ]


def shared_length(stored: Sequence[int], wanted: Sequence[int], at: int, end: int) -> int:
    """How many of the stored ids equal those wanted from ``at`` to ``end``."""
    length = min(len(stored), end - at)
    if tuple(stored[:length]) == tuple(wanted[at : at + length]):
        return length
    pairs = zip(stored, wanted[at:end], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
