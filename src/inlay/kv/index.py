"""Two indexes of stored segments: ``PrefixIndex`` by the text before them, ``TextIndex`` by their content.

``PrefixIndex`` finds every stored segment by its context and then token by token. This is the prefix tree of
ChunkAttention (arXiv 2402.15220, section 3.1) with context digests for edges. A segment lies at the node of its context
digest, under its first token. Its continuation lies at the node of the digest behind its last token. So equal prefixes
share a path from the root without hints, and isolated modules start at the root. Text behind a composed prompt lies at
a node that no other prompt reaches. Segments hold no pointers to each other: a node is a digest. A part of a path may
be evicted and recomputed while the rest stays.

``TextIndex`` finds stored text of requests behind any other text. The prefix tree finds it behind equal text only. If
the tools of a conversation change, the tree no longer finds the conversation's turns, although their KV is stored.
``TextIndex`` has a hash of every 16 tokens of a stored text. A request that accepts approximations reads the turns at a
shift. Their KV then lacks only the effect of the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inlay.kv.identity import KeyMaker, SegmentSpec, TextOwner, TokenRun
from inlay.kv.policies import EvictionQueue, PassCost, Policy, Use, lru
from inlay.kv.pool import KVPool, Origin, PrefixMatch, Segment, SegmentRange, StatePool
from inlay.slots import SlotRange, cut

#: The tokens of a window.
WINDOW = 16
#: Fewer tokens are cheaper to compute than to read as a segment of their own.
LEAST_MOVED = 32
_BASE = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_BASE, power, 2**64) for power in range(WINDOW)], np.uint64)


#: The hash of each window of a text, by the number of its first token: (tokens - 15,), uint64.
Windows = npt.NDArray[np.uint64]

#: How many copies of one window are compared. Further copies are most likely the same text in the same place.
_MOST_COPIES = 4
_BLOCK = 1024  # windows that are looked up at a time


def windows_of(ids: Sequence[int]) -> Windows:
    """Hash each window of a text. A suffix of the result belongs to the same suffix of the text."""
    if len(ids) < WINDOW:
        return np.empty(0, np.uint64)
    found: Windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.uint64), WINDOW) @ _POWERS
    return found


class TextIndex:
    """Stored texts by the hashes of their windows of 16 tokens. A text that is stored twice is found until both go.

    Attributes:
        version: the number of changes since the start.
    """

    def __init__(self) -> None:
        # By owner and hash: the segments with that window, oldest first, each with the window's first token.
        self._windows: dict[TextOwner, dict[int, dict[Segment, int]]] = {}
        self.version = 0

    def add(self, segment: Segment) -> None:
        """Add a segment. Does nothing for a segment that requests may not find by content."""
        if segment.origin is None or not segment.origin.movable:
            return
        windows = self._windows.setdefault(_owner(segment), {})
        for number, value in enumerate(_aligned(segment.run.ids)):
            windows.setdefault(value, {}).setdefault(segment, number * WINDOW)
        self.version += 1

    def remove(self, segment: Segment, kept: int = 0) -> None:
        """Remove a segment behind its first ``kept`` tokens, before it is shortened or dropped."""
        if segment.origin is None or not segment.origin.movable:
            return
        owner, first = _owner(segment), kept - kept % WINDOW
        windows = self._windows.get(owner, {})
        for value in _aligned(segment.run.ids[first:]):
            copies = windows.get(value, {})
            if copies.get(segment, -1) >= first:
                del copies[segment]
                if not copies:
                    del windows[value]
        if not windows:
            self._windows.pop(owner, None)
        self.version += 1

    def find(self, owner: TextOwner, windows: Windows) -> Iterator[tuple[int, Segment, int]]:
        """Yield equal windows: its token in the text, the segment, and its token there. Hashes may collide.

        Args:
            windows: of the text, from ``windows_of``.
        """
        known = self._windows.get(owner)
        if known is None or len(windows) <= LEAST_MOVED - WINDOW:
            return
        for first in range(0, len(windows), _BLOCK):
            for offset, value in enumerate(windows[first : first + _BLOCK].tolist(), first):
                for segment, into in islice(known.get(value, {}).items(), _MOST_COPIES):
                    yield offset, segment, into


def _owner(segment: Segment) -> TextOwner:
    assert segment.origin is not None
    return segment.origin.salt, segment.run.before.adapter


def _aligned(ids: Sequence[int]) -> list[int]:
    """Return the hash of each window that begins at a multiple of 16."""
    whole = len(ids) - len(ids) % WINDOW
    made: list[int] = (np.asarray(ids[:whole], np.uint64).reshape(-1, WINDOW) @ _POWERS).tolist()
    return made


_FEW = 32  # tokens compared first: most mismatches are among these


class IndexListener(Protocol):
    """Called on every change of an index. It must be quick and must not raise."""

    def added(self, segment: Segment) -> None: ...

    def removed(self, segment: Segment) -> None: ...


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the stored text: ``tokens`` into a segment, or a node where a segment may start.

    Invalid after the store has changed.
    """

    place: bytes
    segment: Segment | None = None
    tokens: int = 0


class PrefixIndex:
    """Segments by node and first token. The index owns a share of every chunk of its segments.

    Args:
        policy, cost: the order of eviction; see policies.py.
        states: the states behind segments. None for a model without recurrent layers.

    Attributes:
        listener: called on every change from now on; None for none.
        texts: finds text of requests by its content.
    """

    def __init__(
        self,
        pool: KVPool,
        keys: KeyMaker,
        policy: Policy = lru,
        cost: PassCost | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._pool = pool
        self._states = states
        self._keys = keys
        self._places: dict[bytes, dict[int, Segment]] = {}
        self.by_use: EvictionQueue[Segment] = EvictionQueue(policy, cost or PassCost(), self.behind)
        self.listener: IndexListener | None = None
        self.texts = TextIndex()
        self.segments = 0
        self.tokens = 0  # of all segments
        self.evicted: set[Segment] = set()  # held segments that go when their last hold is released

    def __iter__(self) -> Iterator[Segment]:
        return (segment for branches in self._places.values() for segment in branches.values())

    def place(self, run: TokenRun) -> bytes:
        """The node of a run: its stored prefix lies there, under its first token."""
        return self._keys.place(run.digest, run.start)

    def longest(self, run: TokenRun, *, most: int | None = None, touch: bool = True) -> PrefixMatch:
        """The longest stored prefix of a run, of at most ``most`` tokens. Token ids are compared one by one.

        Args:
            touch: count this as a request for the segments.
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
        return PrefixMatch(tuple(ranges))

    def cursor(self, run: TokenRun) -> Cursor:
        """The start of a run, for ``follow``."""
        return Cursor(self.place(run))

    def follow(self, cursor: Cursor, ids: Sequence[int]) -> tuple[int, Cursor]:
        """Return how many of the next tokens are stored behind a cursor, and the cursor behind them.

        This does not count as a use for eviction.
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
    ) -> PrefixMatch:
        """Store the KV of a run, which lies in ``slots``, except tokens that are stored already.

        Args:
            run: the tokens, with the context in front of them.
            slots: where their KV lies in the pool, one slot a token.
            returns: True if the run was loaded from a tier, which does not count as a use.
            origin: the owner of a request's text; see ``Segment.origin``. None for a module.

        Returns:
            The prefix match of the run. It is shorter than the run if two referenced segments conflict; see ``_cut``.
        """
        found = self.longest(run)
        while found.tokens < len(run.ids) and found.ends_within:
            # The run agrees with only a part of a segment, so that segment is cut in two.
            if not self._cut(found.ranges[-1].segment, found.ranges[-1].end):
                return found
            found = self.longest(run)  # the node behind the cut may have had segments already
        if found.tokens < len(run.ids):
            rest = run.rest(found.tokens)
            own = cut(slots, found.tokens, len(rest.ids))
            new = self._add(rest, own, module=isinstance(run, SegmentSpec), returns=returns)
            self._touch(found.segments)
            found = PrefixMatch((*found.ranges, SegmentRange(new, 0, new.tokens)))
        for segment in found.segments:
            if isinstance(run, SegmentSpec):
                segment.specs[run.key] = segment.parts[run.key] = run
            elif origin is not None:
                known = segment.origin
                segment.origin = origin if known is None else known | origin
                if segment.origin.movable and not (known is not None and known.movable):
                    self.texts.add(segment)
        return found

    def ending_at(self, run: TokenRun, tokens: int) -> Segment | None:
        """Return the segment that ends behind the first ``tokens`` tokens of a run. Cuts a segment there if needed.

        Returns None if these tokens are not all stored, or if no cut is possible; see ``_cut``.
        """
        found = self.longest(run, most=tokens, touch=False)
        if found.tokens < tokens or not found.ranges:
            return None
        last = found.ranges[-1]
        if found.ends_within and not self._cut(last.segment, last.end):
            return None
        return last.segment

    def shorten(self, segment: Segment, tokens: int) -> None:
        """Forget a segment behind its first ``tokens`` tokens and free those chunks. They must have no references."""
        assert segment.held <= tokens, "what is held cannot be forgotten"
        if tokens == 0:
            self.remove(segment)
        elif tokens < segment.tokens:
            self._forget_modules(segment, segment.run.before.tokens + tokens)
            self.tokens -= segment.tokens - tokens
            self._keep_prefix(segment, tokens)

    def remove(self, segment: Segment) -> None:
        """Forget a segment without references and free its chunks."""
        assert not segment.holds, "a held segment cannot be removed"
        self.evicted.discard(segment)
        self.texts.remove(segment)
        if self._states is not None:
            self._states.drop(segment)
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
        """Record that modules with tokens behind token ``end`` are no longer whole. ``end`` counts the context, too."""
        for key, spec in list(segment.specs.items()):
            if _end(spec) > end:
                del segment.specs[key]
                for other in self.longest(spec, touch=False).segments:
                    other.specs.pop(key, None)

    def _cut(self, segment: Segment, tokens: int) -> bool:
        """Cut a segment in two, the first part ``tokens`` long. References then cover both parts, as far as before.

        Another segment may lie at the second part's node: a module that was stored earlier. It is removed. If it has
        references, nothing is cut and False is returned.
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
        self.texts.add(behind)
        if self._states is not None and segment.state is not None:
            self._states.move(segment.state, behind)
        if segment.evicted:
            self.evicted.add(behind)
        self.tokens -= len(rest.ids)
        self._keep_prefix(segment, tokens)
        for hold in segment.holds:
            more = hold.shorten(segment, tokens)
            if more:
                hold.add(behind, more)
        return True

    def _keep_prefix(self, segment: Segment, tokens: int) -> None:
        """End a segment behind ``tokens`` tokens and give up the index's share of the other chunks."""
        if self.listener is not None:
            self.listener.removed(segment)
        self.texts.remove(segment, tokens)
        kept, gone = cut(segment.slots, 0, tokens), cut(segment.slots, tokens, segment.tokens - tokens)
        border = kept[-1].end - 1
        self._pool.free(_without(gone, border // self._pool.chunk_size, self._pool.chunk_size))
        if self._states is not None:
            self._states.drop(segment)
        segment.run, segment.slots = segment.run.prefix(tokens), kept
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
        """Add a segment.

        Args:
            run: its tokens.
            slots: its KV.
            module: True if it is stored as a module.
            part_of: the segment from whose end it was cut. None for a segment that is used now or returns from a tier.
            returns: see ``insert``.
        """
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
        """The segments that are reachable only through this one."""
        return self._places.get(segment.behind, {}).values()

    def _touch(self, segments: Iterable[Segment]) -> None:
        """Record a use. The first segment of a path counts as used last, so that a path is evicted from its end."""
        for segment in reversed(list(segments)):
            self.by_use.touch(segment)


def _end(spec: SegmentSpec) -> int:
    """The number of tokens up to the last one of a module, including its context."""
    return spec.before.tokens + len(spec.ids)


def _without(runs: Sequence[SlotRange], chunk: int, size: int) -> list[SlotRange]:
    """Slot ranges without the slots of one chunk."""
    first, end = chunk * size, (chunk + 1) * size
    return [
        SlotRange(start, stop - start)
        for run in runs
        for start, stop in ((run.first, min(run.end, first)), (max(run.first, end), run.end))
        if start < stop
    ]


def shared_length(stored: Sequence[int], wanted: Sequence[int], at: int, end: int) -> int:
    """The length of the common prefix of ``stored`` and ``wanted[at:end]``."""
    length = min(len(stored), end - at)
    if tuple(stored[:length]) == tuple(wanted[at : at + length]):
        return length
    pairs = zip(stored, wanted[at:end], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
