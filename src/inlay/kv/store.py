"""The store of segments: the pool holds them, the index finds them, and eviction makes room.

If the pool is full, the chunks that the policy ranks lowest are evicted, and no more than needed. Segments are evicted
from their ends, because a chunk is useless without the text before it. A request that is one chunk short takes one
chunk of the lowest-ranked segment, and the rest stays.

Evicting single chunks would fragment the pool over time. So among the chunks that are due soon, those that form long
runs go first. A large pool evicts a few spare chunks, so that a sequence may find the next chunk free.
``lab/benchmarks/pool_runs.py`` measures the effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from inlay.errors import CapacityError
from inlay.kv.identity import KeyMaker, MovedText, SegmentSpec, TextOwner, TokenRun, detached_spec
from inlay.kv.index import LEAST_MOVED, WINDOW, Cursor, IndexListener, PrefixIndex, Windows, windows_of
from inlay.kv.policies import EvictionQueue, PassCost, Policy, lru
from inlay.kv.pool import Hold, KVPool, Origin, PrefixMatch, Segment, StatePool, StoredState
from inlay.slots import SlotRange

#: Spare chunks to evict: this part of the pool, and at most this many.
_SPARE, _MOST_SPARE = 1 / 32, 256
#: So many times the spare chunks are candidates. Of these, chunks that lie side by side are evicted.
_ALIKE = 4


def victims(
    segments: EvictionQueue[Segment], chunks: int, pool: KVPool, may_go: Callable[[Segment], bool] | None = None
) -> list[tuple[Segment, int]]:
    """Return the segments to shorten so that ``chunks`` chunks become free, each with the number of tokens to keep.

    Returns an empty list if that many chunks cannot be freed. Tokens with references stay. A chunk is free when all its
    owners are gone, so a segment stays if other owners keep its chunks.

    Args:
        segments: the eviction queue. Its order decides, except for the two rules in the module docstring.
        may_go: excludes segments; None for no exclusion.
    """
    spare = min(int(pool.chunks * _SPARE), _MOST_SPARE)
    oldest = _Oldest(pool, chunks + _ALIKE * spare)
    with segments.next() as ordered:
        for segment in ordered:
            if (may_go is None or may_go(segment)) and not oldest.add(segment):
                break
    if len(oldest.freeable) < chunks:
        return []
    return oldest.choose(chunks + spare)


def next_to_go(segments: EvictionQueue[Segment], chunks: int, pool: KVPool) -> list[Segment]:
    """The first segments of the eviction queue whose ends free ``chunks`` chunks; all if there are fewer."""
    oldest, found = _Oldest(pool, chunks), []
    with segments.next() as ordered:
        for segment in ordered:
            found.append(segment)
            if not oldest.add(segment):
                break
    return found


@dataclass(eq=False, slots=True)
class _End:
    """The end of a segment: (first token, chunk) from the last chunk on.

    ``behind`` are the ends of the segments that follow and are unreachable without it. ``gone`` counts evicted chunks.
    """

    segment: Segment
    chunks: list[tuple[int, int]]
    behind: list[_End]
    gone: int = 0


class _Oldest:
    """The ends of the first segments in the eviction queue, enough to free ``most`` chunks.

    ``freeable`` are these chunks: all their owners are among these ends.
    """

    def __init__(self, pool: KVPool, most: int) -> None:
        self.freeable: dict[int, None] = {}  # in eviction order
        self._pool = pool
        self._most = most
        self._owners: dict[int, list[tuple[_End, int]]] = {}  # chunk → the ends that own it, and its place in them
        self._places: dict[bytes, list[_End]] = {}  # by index node
        self._left: Counter[int] = Counter()  # chunk → how many of its owners are evicted

    def add(self, segment: Segment) -> bool:
        """Add the next segment of the queue. Returns True if more are needed."""
        held = segment.held
        # EvictionQueue yields the segments behind this one first, so their ends are known.
        end = _End(segment, [], self._places.get(segment.behind, []))
        self._places.setdefault(segment.place, []).append(end)
        for first, chunk in _from_its_end(segment, self._pool.chunk_size):
            if len(self.freeable) >= self._most or first < held:
                break
            owners = self._owners.setdefault(chunk, [])
            owners.append((end, len(end.chunks)))
            end.chunks.append((first, chunk))
            if len(owners) == self._pool.owners(chunk):
                self.freeable[chunk] = None
        return len(self.freeable) < self._most

    def choose(self, chunks: int) -> list[tuple[Segment, int]]:
        """Return the segments to shorten, as ``victims`` does, to free ``chunks`` chunks, or all that can be freed."""
        freed: set[int] = set()
        touched: dict[_End, None] = {}
        for run in self._runs(chunks):
            for chunk in reversed(run):  # most segments end at their highest slots
                if len(freed) >= chunks:
                    break
                for end, at in self._owners[chunk]:
                    self._let_go(end, at + 1, touched, freed)
        return [(end.segment, end.chunks[end.gone - 1][0]) for end in touched]

    def _let_go(self, end: _End, chunks: int, touched: dict[_End, None], freed: set[int]) -> None:
        """Evict the first ``chunks`` chunks of an end, and all that follows it."""
        todo = [(end, chunks)]
        while todo:
            end, chunks = todo.pop()
            if not end.gone:
                todo += [(other, len(other.chunks)) for other in end.behind if other.chunks]
            for _, chunk in end.chunks[end.gone : chunks]:
                self._left[chunk] += 1
                if self._left[chunk] == self._pool.owners(chunk):
                    freed.add(chunk)
            end.gone = max(end.gone, chunks)
            touched[end] = None

    def _runs(self, chunks: int) -> list[range]:
        """Yield freeable chunks as runs: the shortest run that is long enough, or else all runs, longest first."""
        runs: list[range] = []
        for chunk in sorted(self.freeable):
            if runs and runs[-1].stop == chunk:
                runs[-1] = range(runs[-1].start, chunk + 1)
            else:
                runs.append(range(chunk, chunk + 1))
        age = {chunk: number for number, chunk in enumerate(self.freeable)}
        runs.sort(key=lambda run: (-len(run) - self._pool.free_beside(run.start, run.stop), age[run[-1]]))
        fitting = min((run for run in runs if len(run) >= chunks), key=len, default=None)
        return runs if fitting is None else [fitting]


def _from_its_end(segment: Segment, size: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks of a segment from its last one on, each with the first of the segment's tokens in it."""
    end = segment.tokens
    last: tuple[int, int] | None = None  # two consecutive slot ranges may share a chunk
    for run in reversed(segment.slots):
        end -= run.length
        for chunk in range((run.end - 1) // size, run.first // size - 1, -1):
            first = end + max(0, chunk * size - run.first)
            if last is not None and last[1] != chunk:
                yield last
            last = first, chunk
    if last is not None:
        yield last


class Demotion(Protocol):
    """Copies segments to a lower tier before they are evicted. Called with the engine lock held; never waits."""

    def is_safe(self, segment: Segment) -> bool:
        """Return True if evicting the segment loses nothing."""
        ...

    def begin(self, segments: Iterable[Segment]) -> bool:
        """Start copying these segments. Returns True if the caller should wait for the copies."""
        ...

    def give_up(self) -> None:
        """Release all references; unfinished copies are lost."""
        ...

    def evicted(self, segment: Segment) -> None:
        """Called just before a segment is evicted, wholly or in part."""
        ...


class SegmentStore:
    """All segments of one pool.

    Args:
        policy: which segments are evicted first; see policies.py.
        states: the recurrent states behind segments. None for a model without recurrent layers.

    Attributes:
        demotion: asked before anything is evicted; see ``demote_with``. None if evicted segments are lost.
    """

    def __init__(
        self,
        pool: KVPool,
        keys: KeyMaker,
        policy: Policy = lru,
        cost: PassCost | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.pool = pool
        self.states = states
        self.keys = keys
        self.demotion: Demotion | None = None
        self.allocated_chunks = 0  # since the start
        self.lent = 0  # pool tokens held between two steps by background work
        self._index = PrefixIndex(pool, keys, policy, cost, states)

    def __len__(self) -> int:
        return self._index.segments

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._index)

    @property
    def tokens(self) -> int:
        """The number of tokens in the stored segments."""
        return self._index.tokens

    def listen(self, listener: IndexListener) -> None:
        """Report all stored segments to a listener, then every change. Call with the engine lock held."""
        for segment in self._index:
            listener.added(segment)
        self._index.listener = listener

    def demote_with(self, demotion: Demotion) -> None:
        """Have segments copied to a lower tier before they are evicted."""
        self.demotion = demotion

    def get(self, spec: SegmentSpec) -> PrefixMatch | None:
        """The prefix match of a whole segment. None unless all of it is stored, with its state if there are states."""
        found = self.longest(spec)
        whole = found.tokens == len(spec.ids) and (self.states is None or found.state is not None)
        return found if whole else None

    def peek(self, spec: SegmentSpec) -> PrefixMatch | None:
        """Like ``get``, but does not count as a lookup."""
        found = self._readable(self._index.longest(spec, touch=False))
        return found if found.tokens == len(spec.ids) else None

    def place(self, run: TokenRun) -> bytes:
        """The index node of a run. Runs with the same node share their common prefix."""
        return self._index.place(run)

    def longest(self, run: TokenRun, *, most: int | None = None) -> PrefixMatch:
        """The longest stored prefix of a run, at most ``most`` tokens. Evicted segments are not found."""
        return self._readable(self._index.longest(run, most=most))

    @property
    def text_version(self) -> int:
        """Changes whenever ``moved_text`` may give another answer."""
        return self._index.texts.version

    def windows(self, ids: Sequence[int]) -> Windows:
        """Hash a text for ``moved_text``."""
        return windows_of(ids)

    def moved_text(self, owner: TextOwner, ids: Sequence[int], windows: Windows) -> MovedText | None:
        """Return the first run of at least 32 tokens that is stored as text of the owner, behind other text.

        Args:
            owner: the cache salt and adapter of the text.
            ids: the tokens.
            windows: their hashes, from ``windows``. For a suffix of a text, pass the suffix of the text's windows.
        """
        for offset, segment, into in self._index.texts.find(owner, windows[: max(0, len(ids) - WINDOW + 1)]):
            if segment.evicted:
                continue
            before = 0
            while before < min(offset, into) and segment.run.ids[into - before - 1] == ids[offset - before - 1]:
                before += 1
            at, first = offset - before, into - before
            cursor = Cursor(segment.place, segment, first)
            if self._index.follow(cursor, ids[at : at + LEAST_MOVED])[0] < LEAST_MOVED:
                continue
            length, _ = self._index.follow(cursor, ids[at:])
            own = segment.run
            run = TokenRun((*own.ids[:first], *ids[at : at + length]), own.start, own.before, own.continues)
            length = self.longest(run).tokens - first
            if length >= LEAST_MOVED:
                return MovedText(detached_spec(run.prefix(first + length), self.keys), first, at, length)
        return None

    def cursor(self, run: TokenRun) -> Cursor:
        """The start of a run, for ``follow``."""
        return self._index.cursor(run)

    def follow(self, cursor: Cursor, ids: Sequence[int]) -> tuple[int, Cursor]:
        """Return how many of the next tokens are stored behind a cursor, and the cursor behind them."""
        return self._index.follow(cursor, ids)

    def insert(
        self, run: TokenRun, slots: Sequence[SlotRange], *, returns: bool = False, origin: Origin | None = None
    ) -> PrefixMatch:
        """Store a run whose KV has been written to ``slots``. Tokens that are stored already keep their slots.

        Args:
            returns: True if it was loaded from a tier, which does not count as a use.
            origin: the origin of a request's text. None for a module.
        """
        return self._index.insert(run, slots, returns=returns, origin=origin)

    def cut_behind(self, run: TokenRun) -> bool:
        """Cut the segment that continues behind a run, so that a segment may begin there.

        Returns False if impossible.
        """
        stored = self._index.longest(run, touch=False).tokens == len(run.ids)
        return not run.ids or not stored or self._index.ending_at(run, len(run.ids)) is not None

    def opened_behind(self, run: TokenRun, token: int) -> bool:
        """Cut the segment that continues behind a run with this token. Lookups then find the text that begins there.

        Returns False if no stored segment continues so, and for models with recurrent layers, which need no cut.
        """
        if self.states is not None:
            return False
        found = self._index.longest(run, touch=False)
        if found.tokens < len(run.ids) or not found.ends_within:
            return False
        last = found.ranges[-1]
        return last.segment.run.ids[last.end] == token and self._index.ending_at(run, len(run.ids)) is not None

    def keep_state(self, run: TokenRun, tokens: int, slot: int) -> StoredState | None:
        """Store a slot as the state behind the first ``tokens`` tokens of a run.

        Returns None, and frees the slot, if these tokens are not stored or have a state already.
        """
        assert self.states is not None, "this model has no states"
        segment = self._ending_at(run, tokens)
        if segment is None:
            self.states.free(slot)
            return None
        return self.states.keep(segment, slot)

    def adopt_state(self, run: TokenRun, state: StoredState) -> None:
        """Store a state behind a run, if the run is stored without a state."""
        assert self.states is not None, "this model has no states"
        segment = self._ending_at(run, len(run.ids))
        if segment is not None:
            self.states.adopt(segment, state)

    def _ending_at(self, run: TokenRun, tokens: int) -> Segment | None:
        """The segment that ends behind the first ``tokens`` tokens of a run. None if they are not stored."""
        segment = self._index.ending_at(run, tokens)
        return None if segment is None or segment.evicted else segment

    def allocate(self, tokens: int, *, after: SlotRange | None = None, urgent: bool = False) -> tuple[SlotRange, ...]:
        """Slots for tokens. Evicts segments without references if the pool is full.

        Args:
            tokens: their number.
            after: see ``KVPool.allocate``.
            urgent: True if the caller cannot retry. Segments that need no copy are evicted first, then others, which
                are lost.

        Raises:
            CapacityError: no room. Without ``urgent``, victims may first need a copy; try again on the next step.
        """
        runs = self.pool.allocate(tokens, after=after)
        if runs is None and self._evict(self.pool.chunks_for(tokens) - self.pool.free_chunks, urgent):
            runs = self.pool.allocate(tokens, after=after)
        if runs is None:
            raise CapacityError(
                f"the KV pool has room for {self.pool.free_tokens} more tokens and {tokens} are needed; "
                f"give kv_memory at least {self.pool.mib_for(tokens - self.pool.free_tokens)} MiB more"
            )
        self.allocated_chunks += self.pool.chunks_for(tokens)
        return runs

    def next_to_go(self, chunks: int) -> list[Segment]:
        """The segments that are evicted first if this many chunks are needed."""
        return next_to_go(self._index.by_use, chunks, self.pool)

    def hold(self, *found: PrefixMatch) -> Hold:
        """Keep a prefix match from eviction until the hold is released: each segment up to the end of its range."""
        hold = Hold()
        for each in found:
            for stored in each.ranges:
                hold.add(stored.segment, stored.end)
        return hold

    def read(self, *found: PrefixMatch) -> None:
        """Record that a prefix match is read. Eviction counts such reads, but not lookups."""
        for each in found:
            for segment in reversed(each.segments):
                self._index.by_use.read(segment)

    def own_ends(self, run: TokenRun) -> list[Segment]:
        """The stored segments of a run and all that follow it, except a prefix that other text shares.

        Empty if a module continues behind the run: then the whole run is such a prefix. Ends come before prefixes.
        """
        found = self.longest(run)
        if not found.ranges:
            return []
        last = found.ranges[-1]
        behind = self._all_behind(last.segment)
        others = [*behind, last.segment] if last.end < last.segment.tokens else behind
        # Segments behind the run's last token continue the run; segments that branch off earlier belong to other text.
        if (others and found.tokens < len(run.ids)) or any(other.module for other in others):
            return []
        ends = dict.fromkeys([*reversed(behind), last.segment])
        for each in reversed(found.ranges[:-1]):
            if any(other not in ends for other in self._index.behind(each.segment)):
                break
            ends[each.segment] = None
        return list(ends)

    def _all_behind(self, segment: Segment) -> list[Segment]:
        """All segments that are reachable only through this one, prefixes before ends."""
        found: dict[Segment, None] = {}
        todo = [segment]
        while todo:
            behind = [each for each in self._index.behind(todo.pop()) if each not in found]
            found.update(dict.fromkeys(behind))
            todo += behind
        return list(found)

    def forget_behind(self, run: TokenRun, first: int) -> bool:
        """Forget a run from its token number ``first`` on, and all that follows it.

        Modules that were encoded behind the run stay. Returns True if some of it stays because it has references.
        """
        found = self.longest(run)
        at, stays = found.tokens, False
        for each in reversed(found.ranges):
            at -= each.tokens
            keep = max(0, first - at)
            behind = self._all_behind(each.segment)
            if keep >= each.tokens or any(other.module for other in behind):
                break
            self.discard(reversed(behind))
            stays = stays or each.segment.held > keep or any(other.held for other in behind)
            self._index.shorten(each.segment, max(keep, each.segment.held))
            if keep:
                break
        return stays

    def held(self, spec: SegmentSpec) -> bool:
        """True if any stored part of a segment has references."""
        return any(segment.held for segment in self.longest(spec).segments)

    def modules(self) -> dict[bytes, SegmentSpec]:
        """The modules with stored tokens, by key, including those that share all their segments."""
        return {key: spec for segment in self._index for key, spec in segment.parts.items() if not segment.evicted}

    def texts(self, salt: str) -> list[Segment]:
        """The stored segments of request text with this salt. Modules are not included."""
        return [segment for segment in self._index if segment.origin is not None and segment.origin.salt == salt]

    def forget_module(self, spec: SegmentSpec) -> None:
        """Forget a module and the text behind it, except referenced parts and parts that other text shares."""
        self.discard(self._ends_of_module(spec))
        for segment in self._index.longest(spec, touch=False).segments:
            segment.specs.pop(spec.key, None)
            segment.parts.pop(spec.key, None)

    def evict_modules(self, specs: Sequence[SegmentSpec], labels: frozenset[bytes] = frozenset()) -> int:
        """Evict modules with all text that contains or follows them, except parts that other modules or texts share.

        New requests do not find them. Referenced segments are removed after their release; see ``purge``.

        Args:
            specs: the modules.
            labels: text of segments with these labels is evicted, too.

        Returns:
            The number of tokens evicted.
        """
        keys = frozenset(spec.key for spec in specs)
        tokens = sum(self.evict(self._ends_of_module(spec)) for spec in specs)
        names, texts = keys | labels, ((segment, segment.origin) for segment in self._index)
        tokens += self.evict(text for text, origin in texts if origin and not names.isdisjoint(origin.modules))
        for segment in [segment for segment in self._index if not keys.isdisjoint(segment.parts)]:
            for key in keys:
                segment.parts.pop(key, None)
                segment.specs.pop(key, None)
            # If its prefix is gone, it would be found again once the prefix is recomputed.
            if not segment.parts and segment.origin is None:
                tokens += self.evict([segment])
        return tokens

    def evict(self, segments: Iterable[Segment]) -> int:
        """Evict segments: at once without references, otherwise after their release. Returns their tokens."""
        chosen = [segment for segment in segments if not segment.evicted]
        tokens = sum(segment.tokens for segment in chosen)
        for segment in chosen:
            segment.evicted = True
            self._index.evicted.add(segment)
        self.purge()
        return tokens

    def purge(self) -> None:
        """Remove the evicted segments without references."""
        for segment in [segment for segment in self._index.evicted if not segment.holds]:
            self._index.remove(segment)

    def _readable(self, found: PrefixMatch) -> PrefixMatch:
        """A prefix match up to its first evicted segment."""
        if not self._index.evicted:
            return found
        return PrefixMatch(tuple(takewhile(lambda each: not each.segment.evicted, found.ranges)))

    def _ends_of_module(self, spec: SegmentSpec) -> list[Segment]:
        """The segments of a module and the text behind it, ends first, except a prefix that others share.

        Modules that are encoded behind it do not share it: they are found without it.
        """
        found = self._index.longest(spec, touch=False)
        whole, ends = found.tokens == len(spec.ids), dict[Segment, None]()
        for number, each in enumerate(reversed(found.ranges)):
            segment = each.segment
            behind, said_behind = self._text_behind(segment), number == 0 and whole
            if segment.parts.keys() - {spec.key}:
                break
            if not said_behind and (each.end < segment.tokens or any(other not in ends for other in behind)):
                break
            ends |= dict.fromkeys([*reversed(behind), segment])
        return list(ends)

    def _text_behind(self, segment: Segment) -> list[Segment]:
        """The text that is reachable only through a segment, without modules and the text behind them."""
        found: dict[Segment, None] = {}
        todo = [segment]
        while todo:
            behind = [each for each in self._index.behind(todo.pop()) if each not in found and not each.parts]
            found.update(dict.fromkeys(behind))
            todo += behind
        return list(found)

    def discard(self, segments: Iterable[Segment]) -> None:
        """Forget segments, except the parts that have references."""
        for segment in segments:
            self._index.shorten(segment, segment.held)

    def clear(self) -> None:
        """Forget everything without references."""
        self.discard(list(self._index))

    def _evict(self, chunks: int, urgent: bool) -> bool:
        chosen = self._victims(chunks, urgent)
        for segment, tokens in chosen:
            if self.demotion is not None:
                self.demotion.evicted(segment)
            self._index.by_use.evicted(segment)
            self._index.shorten(segment, tokens)
        return bool(chosen)

    def _victims(self, chunks: int, urgent: bool) -> list[tuple[Segment, int]]:
        """Like ``victims``, but only those that need no copy, if others must be copied first.

        So each further call has less to copy, even if the lower tier soon drops some copies.
        """
        order, demotion = self._index.by_use, self.demotion
        if demotion is not None and urgent:
            chosen = victims(order, chunks, self.pool, demotion.is_safe) or victims(order, chunks, self.pool)
            # segments without references come first; copies in progress are given up only if those are too few
            if not chosen:
                demotion.give_up()
            return chosen or victims(order, chunks, self.pool)
        chosen = victims(order, chunks, self.pool)
        safe = [(segment, kept) for segment, kept in chosen if demotion is None or demotion.is_safe(segment)]
        if demotion is None or len(safe) == len(chosen):
            return chosen
        if demotion.begin(segment for segment, _ in chosen if not demotion.is_safe(segment)):
            return [(segment, kept) for segment, kept in safe if segment.held <= kept]
        return victims(order, chunks, self.pool)  # begin() may have acquired references
