"""The plan: which query rows of one forward pass read which stored keys, and turned by how much.

Rows of several sequences that read the same run at the same shift form one work item (the chunk-first phase of
ChunkAttention, arXiv 2402.15220, section 3.3, generalized to sharing sets that are no prefixes); an item with the rows
of one sequence alone is sequence-first work. Work items of the same rows stand together in a block, because a block's
partial results are merged in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from inlay.cache.pool import Run, cut


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored run as one sequence sees it.

    run: where keys and values lie.
    start: the position that the first key was encoded at.
    shift: how far behind that the sequence reads it.
    """

    run: Run
    start: int
    shift: int = 0

    @property
    def end(self) -> int:
        """The position, as encoded, behind the last key."""
        return self.start + self.run.length


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence at consecutive positions, and what they attend to.

    start: the position of the first new token.
    length: how many there are.
    context: what all of them see, besides themselves, in the order of the splice.
    slots: where their own keys and values go; they see these causally.
    """

    start: int
    length: int
    context: tuple[Piece, ...]
    slots: tuple[Run, ...]


@dataclass(slots=True)
class WorkItem:
    """Query rows against one contiguous run of slots, at one shift.

    causal: row i sees the first i + 1 keys; otherwise every row sees every key.
    starts: (position of the first key, number of keys) of each stretch of consecutive positions in the run.
    """

    first: int
    length: int
    shift: int
    causal: bool
    starts: list[tuple[int, int]]

    def key_positions(self) -> Tensor:
        """(keys,) int64, as the rows see them: the encoded positions plus the shift."""
        return torch.cat([torch.arange(start, start + count) for start, count in self.starts]) + self.shift


@dataclass(slots=True)
class Block:
    """All work items of one set of query rows.

    rows: a slice where the rows are neighbours, else their numbers, (rows,) int64.
    """

    rows: slice | Tensor
    items: list[WorkItem]
    memo: dict[object, object] = field(default_factory=dict)  # backends keep per-pass data here, such as masks


@dataclass(slots=True)
class Plan:
    """One forward pass's attention.

    spans: what was asked for, one after the other in row order; the specification.
    blocks: the same as work, in the order in which partial results are merged.
    positions: (rows,) int64, of the query rows.
    slots: where the rows' own keys and values go: one run, or slot numbers (rows,).
    """

    spans: tuple[Span, ...]
    blocks: list[Block]
    positions: Tensor
    slots: Run | Tensor

    @property
    def rows(self) -> int:
        return self.positions.numel()


def build_plan(spans: Sequence[Span]) -> Plan:
    """Turn spans into work items, grouped by (run, shift) and merged where runs lie side by side."""
    groups: dict[tuple[Piece, bool], list[tuple[int, int]]] = {}
    row = 0
    for span in spans:
        for piece in span.context:
            groups.setdefault((piece, False), []).append((row, row + span.length))
        for piece, causal, first, last in _own_pieces(span):
            groups.setdefault((piece, causal), []).append((row + first, row + last))
        row += span.length
    return Plan(
        spans=tuple(spans),
        blocks=_blocks(groups),
        positions=torch.cat([torch.arange(s.start, s.start + s.length) for s in spans]),
        slots=_slots(spans),
    )


def advance(plan: Plan, spans: Sequence[Span]) -> Plan:
    """The plan of the next decode step, by growing the last one in place: the grouping stays, only lengths grow.

    plan: of one token a span. spans: the same sequences one token on, each in the slot behind its last one, with that
    one in its context.
    """
    grown = {span.slots[0].first for span in plan.spans}
    for block in plan.blocks:
        block.memo.clear()
        for item in block.items:
            if item.first + item.length - 1 in grown and item.shift == 0:
                item.length += 1
                start, count = item.starts[-1]
                item.starts[-1] = (start, count + 1)
    return Plan(tuple(spans), plan.blocks, plan.positions + 1, _slots(spans))


def pieces_at(runs: Sequence[Run], start: int, shift: int = 0) -> tuple[Piece, ...]:
    """Runs that hold keys encoded at consecutive positions from ``start`` on."""
    found = []
    for run in runs:
        found.append(Piece(run, start, shift))
        start += run.length
    return tuple(found)


def extend(context: tuple[Piece, ...], runs: Sequence[Run], start: int) -> tuple[Piece, ...]:
    """A context with more unshifted keys behind it, as part of its last piece where they carry that on."""
    for piece in pieces_at(runs, start):
        last = context[-1] if context else None
        if last is not None and last.run.end == piece.run.first and last.end == piece.start and last.shift == 0:
            context = (*context[:-1], Piece(Run(last.run.first, last.run.length + piece.run.length), last.start))
        else:
            context = (*context, piece)
    return context


def _own_pieces(span: Span) -> Iterable[tuple[Piece, bool, int, int]]:
    """A span's own keys as (piece, causal, first row, row behind the last): the diagonal, and what lies below it."""
    for piece in pieces_at(cut(span.slots, 0, span.length), span.start):
        first, last = piece.start - span.start, piece.end - span.start
        yield piece, piece.run.length > 1, first, last
        if last < span.length:
            yield piece, False, last, span.length


def _blocks(groups: dict[tuple[Piece, bool], list[tuple[int, int]]]) -> list[Block]:
    by_rows: dict[tuple[tuple[int, int], ...], list[tuple[Piece, bool]]] = {}
    for key, stretches in groups.items():
        by_rows.setdefault(_join_rows(stretches), []).append(key)
    return [Block(_row_index(rows), _merge_neighbours(keys)) for rows, keys in by_rows.items()]


def _merge_neighbours(keys: list[tuple[Piece, bool]]) -> list[WorkItem]:
    """One work item for pieces that lie side by side in the pool and are read at the same shift."""
    items: list[WorkItem] = []
    for piece, causal in sorted(keys, key=lambda key: (key[1], key[0].shift, key[0].run.first)):
        last = items[-1] if items else None
        mergeable = last is not None and not causal and not last.causal and last.shift == piece.shift
        if last is not None and mergeable and last.first + last.length == piece.run.first:
            last.length += piece.run.length
            start, count = last.starts[-1]
            if start + count == piece.start:
                last.starts[-1] = (start, count + piece.run.length)
            else:
                last.starts.append((piece.start, piece.run.length))
        else:
            items.append(
                WorkItem(piece.run.first, piece.run.length, piece.shift, causal, [(piece.start, piece.run.length)])
            )
    return items


def _join_rows(stretches: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for first, last in stretches:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _row_index(rows: tuple[tuple[int, int], ...]) -> slice | Tensor:
    if len(rows) == 1:
        return slice(*rows[0])
    return torch.cat([torch.arange(first, last) for first, last in rows])


def _slots(spans: Sequence[Span]) -> Run | Tensor:
    runs = [run for span in spans for run in cut(span.slots, 0, span.length)]
    if all(left.end == right.first for left, right in pairwise(runs)):
        return Run(runs[0].first, sum(run.length for run in runs))
    return torch.cat([torch.arange(run.first, run.end) for run in runs])
