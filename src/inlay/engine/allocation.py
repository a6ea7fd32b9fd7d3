"""A request's allocation in the KV pool: the KV that it reads, the tokens left to compute, and its open tail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from inlay.attention.mass import AttentionMass
from inlay.attention.plan import Item, Part, PlanContext, Table, items_at, table_of
from inlay.engine.lookup import Lookup
from inlay.engine.recurrent_state import RecurrentState, StateStart
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.offload.loader import Arrival
from inlay.kv.pool import Hold, KVPool, PrefixMatch, StoredState
from inlay.models.mixers.states import StateSpan
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan, RecomputedSpan
from inlay.slots import SlotRange, cut, join, total


@dataclass(eq=False, slots=True)
class SequenceStates:
    """The state of a running request for a model that is served without reuse.

    Attributes:
        cache: from transformers' code. None before the first pass.
        tokens: the number of tokens that it has been given.
        waiting: the last tokens, if they must run together with later ones.
    """

    cache: Any = None
    tokens: int = 0
    waiting: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to run through the model, and the rows that they fill.

    Attributes:
        mass: records how much these tokens attend to each key. None for no record.
        check: True to run the tokens through the first layers only and measure their key deviation.
        adapter: the digest of the adapter to use; b"" for the model alone.
        states: the request's state. Used only by models that are served without reuse.
        state: the slots of the recurrent state in front of the tokens and behind them. None without recurrent layers.
    """

    ids: tuple[int, ...]
    part: Part
    mass: AttentionMass | None = None
    check: bool = False
    adapter: bytes = b""
    states: SequenceStates | None = None
    state: StateSpan | None = None

    def split(self, tokens: int) -> tuple[Work, Work]:
        """Split into two works: the first ``tokens`` tokens, and the rest with these as context."""
        first, rest = self.part.split(tokens)
        return replace(self, ids=self.ids[:tokens], part=first), replace(self, ids=self.ids[tokens:], part=rest)

    def goes_on_in(self, behind: Work) -> bool:
        """True if later work of the same request, which sees this as context, may be computed in one piece with it."""
        alike = self.adapter == behind.adapter and self.check == behind.check and self.states is behind.states
        return alike and self.mass is None and behind.mass is None and self.part.positions[-1] < behind.part.start


@dataclass(eq=False, slots=True)
class Prefill:
    """A part of a prompt to compute: a module that was not stored, or a run of the request's own tokens.

    ``keep`` includes the stored prefix, so that a stored segment with another continuation is cut at the right token.

    Attributes:
        left: the tokens that are not computed yet. None for none.
        keep: the run to store, in ``slots``, when this is computed. None for none.
        pending: the part of ``keep`` that is computed here.
        key: the module's key; empty for the request's own text.
        begins: the recurrent state in front of ``left``. None if it continues the tokens computed before it, or for a
            model without recurrent layers.
    """

    left: Work | None
    keep: TokenRun | None
    slots: tuple[SlotRange, ...]
    pending: TokenRun | None
    key: bytes = b""
    begins: StateStart | None = None

    @property
    def module(self) -> bool:
        """True for a module, False for the request's own text."""
        return bool(self.key)

    @property
    def tokens_left(self) -> int:
        return 0 if self.left is None else self.left.part.rows

    @property
    def computed(self) -> int:
        """The number of computed tokens among those that will be stored."""
        return 0 if self.pending is None else len(self.pending.ids) - self.tokens_left

    def begun(self) -> tuple[TokenRun, tuple[SlotRange, ...]] | None:
        """The computed part of ``keep`` and its slots, if it may be stored already."""
        if self.left is None or self.keep is None or not self.computed:
            return None
        done = len(self.keep.ids) - self.tokens_left
        return self.keep.prefix(done), cut(self.slots, 0, done)

    def take(self, tokens: int) -> Work:
        """Remove the next ``tokens`` tokens from ``left``, or all if there are fewer, and return them as work."""
        assert self.left is not None, "nothing is left to take"
        if self.left.part.rows <= tokens:
            taken, self.left = self.left, None
        else:
            taken, self.left = self.left.split(tokens)
        return taken


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for the first ``tokens`` tokens of a run that a prefill computes."""

    prefill: Prefill
    run: TokenRun
    tokens: int


@dataclass(eq=False, slots=True)
class SequenceAllocation:
    """A running request's allocation in the pool; empty for a waiting request.

    Attributes:
        modules: its own slots for modules that it computes.
        tail: its own slots for its text, computed and to come.
        tokens: the number of used slots of the tail.
        decoded: how many of these hold tokens generated since admission.
        context: the KV that the token behind its prompt attends to.
        hold: the stored segments that it reads.
        prefill: the parts that are not computed yet, or were computed in a pass whose end is not known yet.
        since: the time of admission, in seconds of ``perf_counter``.
        last: the run that the answer continues, with its slots. None if it must not be stored.
        states: the state of a model that is served without reuse; see Work.
        state: the recurrent state. None for a model without recurrent layers.
        arrivals: segments that it reads while they are still loading.
        arrived: the slots of ``arrivals`` and of earlier arrivals. The request shares their ownership.
    """

    modules: tuple[SlotRange, ...] = ()
    tail: tuple[SlotRange, ...] = ()
    tokens: int = 0
    decoded: int = 0
    context: PlanContext = field(default_factory=PlanContext)
    prefill: list[Prefill] = field(default_factory=list)
    hold: Hold = field(default_factory=Hold)
    last: tuple[TokenRun, tuple[SlotRange, ...]] | None = None
    states: SequenceStates = field(default_factory=SequenceStates)
    state: RecurrentState | None = None
    arrivals: tuple[Arrival, ...] = ()
    arrived: tuple[SlotRange, ...] = ()
    _chunks: tuple[tuple[SlotRange, ...], frozenset[int]] | None = None  # (tail, chunks of the tail and the modules)
    _row: Part | None = None  # the first row of the last decode step
    _row_slot: int = 0  # the number of its slot in the tail
    since: float = field(default_factory=time.perf_counter)

    @property
    def room(self) -> int:
        """The number of slots of the tail."""
        return total(self.tail)

    def chunks(self, pool: KVPool) -> frozenset[int]:
        """The chunks that it owns."""
        if self._chunks is None or self._chunks[0] is not self.tail:
            self._chunks = self.tail, frozenset(pool.chunks_of(self.modules + self.tail))
        return self._chunks[1]

    @property
    def prompt_left(self) -> int:
        return sum(prefill.tokens_left for prefill in self.prefill)

    def take(self, tokens: int) -> tuple[list[Work], list[Prefill]]:
        """Return work for the prompt's next ``tokens`` tokens, and the prefills that this work completes."""
        modules: list[Work] = []
        own: list[list[Work]] = []  # groups that are computed in one piece
        starts: list[StateStart | None] = []  # of these groups
        completed: list[Prefill] = []
        making: list[StoredState] = []  # the states of modules that this pass computes
        if self.state is not None:
            self.state.release_read()
        for prefill in self.prefill:
            begins, prefill.begins = prefill.begins, None
            if tokens <= 0 or (begins is not None and begins.state in making):  # no pass reads a state that it makes
                prefill.begins = begins
                break
            if prefill.left is None:
                continue
            work = prefill.take(tokens)
            tokens -= work.part.rows
            if prefill.module:
                if self.state is not None:
                    making.append(self.state.modules[prefill.key])
                    work = replace(work, state=self.state.advance_module(prefill.key, begins))
                modules.append(work)
            elif own and begins is None and own[-1][-1].goes_on_in(work):
                own[-1].append(work)
            else:
                own.append([work])
                starts.append(begins)
            if prefill.left is None:
                completed.append(prefill)
        works = list(map(_as_one, own))
        if self.state is not None:
            works = [
                replace(work, state=self.state.advance(work.part.rows, start))
                for work, start in zip(works, starts, strict=True)
            ]
        return [*modules, *works], completed

    def extend(self, ranges: tuple[SlotRange, ...]) -> None:
        """Append slots to the tail."""
        self.tail = join((*self.tail, *ranges))

    def next_rows(self, position: int, drafted: int = 0) -> Part:
        """The row of the last generated token, to compute at ``position``, and one for each draft token behind it.

        The first row is kept from step to step. Draft rows use the slots of tokens to come. If a draft is rejected, the
        next step overwrites its slots.
        """
        if self._row is None:
            self._row = Part.of(position, 1, self.context.table, cut(self.tail, self.tokens, 1))
            self._row_slot = self.tokens
        while self._row_slot < self.tokens:
            self._row_slot += 1
            self._row = self._row.next(cut(self.tail, self._row_slot, 1)[0].first)
        if not drafted:
            return self._row
        ranges = cut(self.tail, self.tokens + 1, drafted)
        return self._row.ahead(np.concatenate([np.arange(each.first, each.end) for each in ranges]))

    def decode(self) -> None:
        """Record that the next row of ``next_rows`` is computed and that its token belongs to the answer."""
        self.tokens += 1
        self.decoded += 1

    def kept(self, said: tuple[int, ...]) -> tuple[TokenRun, tuple[SlotRange, ...]] | None:
        """The run of the answer that may be stored, with its slots.

        Args:
            said: all tokens generated since admission, computed or not.
        """
        computed = self.decoded + self._ahead(said)
        if self.last is None or self.prefill or not computed:
            return None
        run, slots = self.last
        longer = TokenRun(run.ids + said[:computed], run.start, run.before, run.continues)
        return longer, slots + cut(self.tail, self.tokens - self.decoded, computed)

    def _ahead(self, said: tuple[int, ...]) -> int:
        """1 if a pass in flight has computed the last token too, and the recurrent state covers it; else 0.

        Its KV counts then, so that the state is not lost.
        """
        if self.state is None or self.last is None or len(said) <= self.decoded:
            return 0
        run, _ = self.last
        return int(self.state.tokens == run.before.tokens + len(run.ids) + self.decoded + 1)


def pieces(found: PrefixMatch, start: int, tokens: int) -> tuple[Item, ...]:
    """The first ``tokens`` tokens of a prefix match as plan items, read from position ``start`` on."""
    read: tuple[Item, ...] = ()
    for each in found.part(0, tokens).ranges:
        read += items_at(each.slots, each.start, start - each.start)
        start += each.tokens
    return read


def without(items: Sequence[Item], offsets: Sequence[int]) -> tuple[Item, ...]:
    """Return items without the tokens at ``offsets``, which are increasing and count from the items' first token."""
    if not offsets:
        return tuple(items)
    left, at, numbers = [], 0, np.asarray(offsets)
    for item in items:
        length = item.slots.length
        own = numbers[np.searchsorted(numbers, at) : np.searchsorted(numbers, at + length)] - at
        left.append(replace(item, left_out=tuple((own + item.slots.first).tolist())) if own.size else item)
        at += length
    return tuple(left)


def scattered(ranges: Sequence[SlotRange], positions: Table) -> tuple[Item, ...]:
    """Return plan items for slots whose tokens have any increasing positions: one item per run of neighbours.

    Args:
        ranges: the slots.
        positions: one per slot.
    """
    items: list[Item] = []
    at = 0
    for each in ranges:
        own = positions[at : at + each.length]
        borders = [0, *(np.flatnonzero(np.diff(own) != 1) + 1).tolist(), each.length]
        items += [Item(SlotRange(each.first + first, end - first), int(own[first])) for first, end in pairwise(borders)]
        at += each.length
    return tuple(items)


def allocation_of(
    composed: ComposedPrompt,
    lookup: Lookup,
    modules: tuple[SlotRange, ...],
    tail: tuple[SlotRange, ...],
    hold: Hold,
    adapter: bytes,
    state: RecurrentState | None = None,
) -> SequenceAllocation:
    """The allocation of a composed prompt: the KV it reads and the work to compute.

    Args:
        adapter: for its own text.
        state: its recurrent state. None for a model without recurrent layers.
    """
    allocation = SequenceAllocation(modules=modules, tail=tail, hold=hold, state=state)
    encoded = _lay_modules(lookup, modules, allocation)
    for part, found in zip(composed, lookup.prefixes, strict=True):
        if isinstance(part, NewSpan):
            _lay_fresh(part, found, allocation, adapter)
        elif isinstance(part, RecomputedSpan):
            _lay_recomputed(part, found or PrefixMatch(()), allocation, adapter)
        else:
            read = _module_pieces(part.spec, lookup, encoded, part.start, part.first, part.length)
            allocation.context.extend(without(read, [offset - part.first for offset in part.left_out]))
    if state is not None:
        _begin(composed, lookup, allocation.prefill, state)
    return allocation


def _begin(composed: ComposedPrompt, lookup: Lookup, prefills: Sequence[Prefill], state: RecurrentState) -> None:
    """Give each prefill the recurrent state in front of it: of the stored tokens before it, or of a module."""

    def behind(spec: SegmentSpec) -> StoredState | None:
        return state.modules.get(spec.key) or lookup.modules[spec.key][1].state

    own = iter([prefill for prefill in prefills if not prefill.module])
    for prefill in prefills:
        if prefill.module:
            spec, found = lookup.modules[prefill.key]
            before = behind(spec.parent) if spec.parent is not None and not found.tokens else found.state
            prefill.begins = state.begin(spec.before.tokens + found.tokens, before)
    at, last, computed = 0, None, False  # the state behind the parts so far, unless their last token is computed
    for part, prefix in zip(composed, lookup.prefixes, strict=True):
        if isinstance(part, CachedSpan):
            at, last, computed = at + part.length, behind(part.spec), False
            continue
        done = 0 if prefix is None else prefix.tokens
        if prefix is not None and done:
            last, computed = prefix.state, False
        if done < len(part.ids):
            prefill = next(own)
            prefill.begins = None if computed else state.begin(at + done, last)
            computed = True
        at += len(part.ids)


def _lay_modules(
    lookup: Lookup, slots: tuple[SlotRange, ...], allocation: SequenceAllocation
) -> dict[bytes, tuple[SlotRange, ...]]:
    """Add prefill work for missing modules, side by side in ``slots``. Returns each module's slots by its key."""
    encoded: dict[bytes, tuple[SlotRange, ...]] = {}
    at = 0
    context = PlanContext()
    laid: tuple[SegmentSpec, ...] = ()  # the modules in ``context``, which most modules extend
    for spec, found in lookup.missing:
        assert not spec.detached, "moved text is read while it is stored, and never encoded"
        done, left = found.tokens, len(spec.ids) - found.tokens
        own = encoded[spec.key] = cut(slots, at, left)
        at += left
        if spec.context[: len(laid)] != laid:
            context, laid = PlanContext(), ()
        for other in spec.context[len(laid) :]:
            context.extend(_module_pieces(other, lookup, encoded, other.start, 0, len(other.ids)))
        laid = spec.context
        before = np.hstack((context.table, table_of(pieces(found, spec.start, done)))) if done else context.table
        work = Work(spec.ids[done:], Part.of(spec.start + done, left, before, own), adapter=spec.before.adapter)
        allocation.prefill.append(Prefill(work, spec, found.slots + own, spec.rest(done), spec.key))
    return encoded


def _module_pieces(
    spec: SegmentSpec, lookup: Lookup, encoded: dict[bytes, tuple[SlotRange, ...]], start: int, first: int, length: int
) -> tuple[Item, ...]:
    """Plan items of ``length`` tokens of a module from ``first`` on, read from position ``start`` on.

    Stored tokens come first, then computed ones.
    """
    found = lookup.modules[spec.key][1]
    done = max(first, found.tokens)
    rest = cut(encoded.get(spec.key, ()), done - found.tokens, max(0, first + length - done))
    stored = pieces(found.part(first, first + length), start, length)
    return stored + items_at(rest, spec.start + done, start - first - spec.start)


def _lay_fresh(part: NewSpan, found: PrefixMatch | None, allocation: SequenceAllocation, adapter: bytes) -> None:
    """Add a run of the request's own tokens: read the stored part and compute the rest."""
    done = 0 if found is None else found.tokens
    if found is not None and done:
        allocation.context.extend(pieces(found, part.start, done))
    slots = cut(allocation.tail, allocation.tokens, len(part.ids) - done)
    allocation.last = _whole(part, found, slots)
    if done == len(part.ids):
        return
    start = part.start + done
    rows = Part.of(start, len(part.ids) - done, allocation.context.table, slots)
    keep, lies = allocation.last or (None, ())
    pending = None if keep is None else keep.rest(done)
    work = Work(part.ids[done:], rows, adapter=adapter, states=allocation.states)
    allocation.prefill.append(Prefill(work, keep, lies, pending))
    allocation.context.extend(items_at(slots, start))
    allocation.tokens += len(part.ids) - done


def _lay_recomputed(part: RecomputedSpan, found: PrefixMatch, allocation: SequenceAllocation, adapter: bytes) -> None:
    """Add recomputed tokens of a module: read the stored ones and compute the rest in the request's own slots."""
    done, positions = found.tokens, np.array(part.positions)
    allocation.context.extend(scattered(found.slots, positions[:done]))
    if done == len(part.ids):
        return
    slots = cut(allocation.tail, allocation.tokens, len(part.ids) - done)
    # the module's other tokens lie between them
    rows = Part.at(positions[done:], allocation.context.table, slots, among=True)
    work = Work(part.ids[done:], rows, adapter=adapter, states=allocation.states)
    allocation.prefill.append(Prefill(work, part.run, found.slots + slots, part.run.rest(done)))
    allocation.context.extend(scattered(slots, positions[done:]))
    allocation.tokens += len(part.ids) - done


def _as_one(works: list[Work]) -> Work:
    """Join consecutive works into one part, so that a prompt of many pieces is computed as fast as a single piece."""
    if len(works) == 1:
        return works[0]
    ids = tuple(token for work in works for token in work.ids)
    return replace(works[-1], ids=ids, part=Part.joined([work.part for work in works]))


def _whole(
    part: NewSpan, found: PrefixMatch | None, slots: tuple[SlotRange, ...]
) -> tuple[TokenRun, tuple[SlotRange, ...]] | None:
    """A run with all its slots, stored and own, for the store and for the answer to continue. None if it has no run."""
    if part.run is None:
        return None
    return part.run, (() if found is None else found.slots) + slots
