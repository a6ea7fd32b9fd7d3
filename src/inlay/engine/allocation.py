"""A request's place in the KV pool: where what it attends to lies, what is left to compute of it, and its open tail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from inlay.attention.mass import AttentionMass
from inlay.attention.plan import Context, Item, Part, Table, items_at, table_of
from inlay.engine.lookup import Lookup
from inlay.kv.arrivals import Arrival
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.pool import KVPool
from inlay.kv.segment import Found, Hold
from inlay.prompt.splice import Fresh, Repaired, Splice
from inlay.slots import SlotRange, cut, join, total


@dataclass(eq=False, slots=True)
class SequenceStates:
    """What a model that is served without reuse keeps of a running request.

    cache: as transformers' code returns it; None before the first pass. tokens: how many it has been given.
    waiting: the last of them that have not run yet, as they have to run with those that follow.
    """

    cache: Any = None
    tokens: int = 0
    waiting: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to run through the model, and the rows that they fill.

    mass: who wants to know what they attend to; None for nobody. check: whether they go through the first layers only,
        to find how their keys change where they stand here.
    adapter: the digest of the one that computes them; b"" for the model alone.
    states: of the request, for models that are served without reuse; others do not look at it.
    """

    ids: tuple[int, ...]
    part: Part
    mass: AttentionMass | None = None
    check: bool = False
    adapter: bytes = b""
    states: SequenceStates | None = None

    def split(self, tokens: int) -> tuple[Work, Work]:
        """The first ``tokens`` tokens, and the rest, which sees them as context."""
        first, rest = self.part.split(tokens)
        return replace(self, ids=self.ids[:tokens], part=first), replace(self, ids=self.ids[tokens:], part=rest)

    def goes_on_in(self, behind: Work) -> bool:
        """Whether other work of the same request, which sees this as context, may be computed as one with it."""
        alike = self.adapter == behind.adapter and self.check == behind.check and self.states is behind.states
        return alike and self.mass is None and behind.mass is None and self.part.positions[-1] < behind.part.start


@dataclass(eq=False, slots=True)
class Prefill:
    """A part of a prompt that is computed: a module that was not stored, or a run of the request's own tokens.

    left: what is not computed yet; None for nothing.
    keep: the run that the store keeps when this is computed, in ``slots``: this part and what was stored in front of
        it, so that a stored segment that goes on otherwise is cut where they part. None for nothing.
    pending: what of that this part computes.
    key: the module's that it is; empty for a run of the request's own text.
    """

    left: Work | None
    keep: TokenRun | None
    slots: tuple[SlotRange, ...]
    pending: TokenRun | None
    key: bytes = b""

    @property
    def module(self) -> bool:
        """Whether it is a module's, not the request's own text."""
        return bool(self.key)

    @property
    def tokens_left(self) -> int:
        return 0 if self.left is None else self.left.part.rows

    @property
    def computed(self) -> int:
        """How many of the tokens that it computes for others, too, are computed."""
        return 0 if self.pending is None else len(self.pending.ids) - self.tokens_left

    def begun(self) -> tuple[TokenRun, tuple[SlotRange, ...]] | None:
        """What the store may keep of what is computed to some token and no further."""
        if self.left is None or self.keep is None or not self.computed:
            return None
        done = len(self.keep.ids) - self.tokens_left
        return self.keep.beginning(done), cut(self.slots, 0, done)

    def take(self, tokens: int) -> Work:
        """The next part of at most that many tokens."""
        assert self.left is not None, "nothing is left to take"
        if self.left.part.rows <= tokens:
            taken, self.left = self.left, None
        else:
            taken, self.left = self.left.split(tokens)
        return taken


@dataclass(eq=False, slots=True)
class SequenceAllocation:
    """A running request's place in the pool; an empty one for a request that waits.

    modules: slots that it owns for modules that it computes. tail: those of its own tokens, stored and to come.
    tokens: how many slots of the tail are taken. decoded: how many of them by tokens said since it was admitted.
    context: what the token behind its prompt sees. hold: the stored segments that it reads.
    prefill: parts that are not computed, or not known to be. since: when it was admitted, seconds of ``perf_counter``.
    last: the run of tokens that an answer carries on, with its slots; None where nothing may be kept of it.
    states: see Work.
    arrivals: segments among those that it reads which are still on their way up; arrived: the slots of those and of
        earlier ones, which it owns a share of.
    """

    modules: tuple[SlotRange, ...] = ()
    tail: tuple[SlotRange, ...] = ()
    tokens: int = 0
    decoded: int = 0
    context: Context = field(default_factory=Context)
    prefill: list[Prefill] = field(default_factory=list)
    hold: Hold = field(default_factory=Hold)
    last: tuple[TokenRun, tuple[SlotRange, ...]] | None = None
    states: SequenceStates = field(default_factory=SequenceStates)
    arrivals: tuple[Arrival, ...] = ()
    arrived: tuple[SlotRange, ...] = ()
    _chunks: tuple[tuple[SlotRange, ...], frozenset[int]] | None = None  # of a tail: its chunks and the modules'
    _row: Part | None = None  # of the last decode step
    _computed: bool = False  # whether that step has run
    since: float = field(default_factory=time.perf_counter)

    @property
    def room(self) -> int:
        """Slots of the tail."""
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
        """The prompt's next tokens as work, and the parts that this completes."""
        modules: list[Work] = []
        own: list[list[Work]] = []  # in stretches that are computed as one
        completed: list[Prefill] = []
        for prefill in self.prefill:
            if tokens <= 0:
                break
            if prefill.left is None:
                continue
            work = prefill.take(tokens)
            tokens -= work.part.rows
            if prefill.module:
                modules.append(work)
            elif own and own[-1][-1].goes_on_in(work):
                own[-1].append(work)
            else:
                own.append([work])
            if prefill.left is None:
                completed.append(prefill)
        return [*modules, *map(_as_one, own)], completed

    def extend(self, ranges: tuple[SlotRange, ...]) -> None:
        """More slots behind the tail."""
        self.tail = join((*self.tail, *ranges))

    def next_row(self, position: int) -> Part:
        """The row of the token said last, which is to be computed at ``position``; kept from step to step."""
        slots = cut(self.tail, self.tokens, 1)
        if self._row is None:
            self._row = Part.of(position, 1, self.context.table, slots)
        elif self._computed:
            self._row, self._computed = self._row.next(slots[0].first), False
        return self._row

    def decode(self) -> None:
        """Note that the row of ``next_row`` is computed."""
        self._computed = True
        self.tokens += 1
        self.decoded += 1

    def kept(self, said: tuple[int, ...]) -> tuple[TokenRun, tuple[SlotRange, ...]] | None:
        """What the store may keep of an answer. said: all its tokens since it was admitted, computed or not."""
        if self.last is None or self.prefill or not self.decoded:
            return None
        run, slots = self.last
        longer = TokenRun(run.ids + said[: self.decoded], run.start, run.before, run.continues)
        return longer, slots + cut(self.tail, self.tokens - self.decoded, self.decoded)


def pieces(found: Found, start: int, tokens: int) -> tuple[Item, ...]:
    """The first ``tokens`` tokens of what was found, read from position ``start`` on, as a plan sees them."""
    read: tuple[Item, ...] = ()
    for each in found.part(0, tokens).ranges:
        read += items_at(each.slots, each.start, start - each.start)
        start += each.tokens
    return read


def without(items: Sequence[Item], offsets: Sequence[int]) -> tuple[Item, ...]:
    """Items as they are read where some of their tokens are not. offsets: increasing, counted from the first token."""
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
    """Keys that lie side by side and were encoded at any increasing positions, as stretches of consecutive ones.

    positions: of each. ranges: as many slots.
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
    splice: Splice,
    lookup: Lookup,
    modules: tuple[SlotRange, ...],
    tail: tuple[SlotRange, ...],
    hold: Hold,
    adapter: bytes,
) -> SequenceAllocation:
    """The allocation of a splice: what it reads, and what it computes. adapter: what computes its own text."""
    allocation = SequenceAllocation(modules=modules, tail=tail, hold=hold)
    encoded = _lay_modules(lookup, modules, allocation)
    for part, found in zip(splice, lookup.beginnings, strict=True):
        if isinstance(part, Fresh):
            _lay_fresh(part, found, allocation, adapter)
        elif isinstance(part, Repaired):
            _lay_repaired(part, found or Found(()), allocation, adapter)
        else:
            read = _module_pieces(part.spec, lookup, encoded, part.start, part.first, part.length)
            allocation.context.extend(without(read, [offset - part.first for offset in part.left_out]))
    return allocation


def _lay_modules(
    lookup: Lookup, slots: tuple[SlotRange, ...], allocation: SequenceAllocation
) -> dict[bytes, tuple[SlotRange, ...]]:
    """Prefill work for what is missing of modules, side by side; returns where that goes."""
    encoded: dict[bytes, tuple[SlotRange, ...]] = {}
    at = 0
    context = Context()
    laid: tuple[SegmentSpec, ...] = ()  # what that is of: most modules see what the one before does, and more
    for spec, found in lookup.missing:
        done, left = found.tokens, len(spec.ids) - found.tokens
        own = encoded[spec.key] = cut(slots, at, left)
        at += left
        if spec.context[: len(laid)] != laid:
            context, laid = Context(), ()
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
    """Tokens of a module from ``first`` on, read from ``start`` on: what is stored of them, and what is computed."""
    found = lookup.modules[spec.key][1]
    done = max(first, found.tokens)
    rest = cut(encoded.get(spec.key, ()), done - found.tokens, max(0, first + length - done))
    stored = pieces(found.part(first, first + length), start, length)
    return stored + items_at(rest, spec.start + done, start - first - spec.start)


def _lay_fresh(part: Fresh, found: Found | None, allocation: SequenceAllocation, adapter: bytes) -> None:
    """A run of the request's own tokens: read what is stored of it, compute the rest."""
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


def _lay_repaired(part: Repaired, found: Found, allocation: SequenceAllocation, adapter: bytes) -> None:
    """Tokens of a module computed anew, in slots of the request's own, where they are not stored."""
    done, positions = found.tokens, np.array(part.positions)
    allocation.context.extend(scattered(found.slots, positions[:done]))
    if done == len(part.ids):
        return
    slots = cut(allocation.tail, allocation.tokens, len(part.ids) - done)
    rows = Part.at(positions[done:], allocation.context.table, slots, among=True)  # the module's others, between them
    work = Work(part.ids[done:], rows, adapter=adapter, states=allocation.states)
    allocation.prefill.append(Prefill(work, part.run, found.slots + slots, part.run.rest(done)))
    allocation.context.extend(scattered(slots, positions[done:]))
    allocation.tokens += len(part.ids) - done


def _as_one(works: list[Work]) -> Work:
    """Work that goes on from one to the next, with one part: a prompt of many pieces then costs what one piece does."""
    if len(works) == 1:
        return works[0]
    ids = tuple(token for work in works for token in work.ids)
    return replace(works[-1], ids=ids, part=Part.joined([work.part for work in works]))


def _whole(
    part: Fresh, found: Found | None, slots: tuple[SlotRange, ...]
) -> tuple[TokenRun, tuple[SlotRange, ...]] | None:
    """A run with all its slots, stored and own: what the store keeps, and what an answer carries on."""
    if part.run is None:
        return None
    return part.run, (() if found is None else found.slots) + slots
