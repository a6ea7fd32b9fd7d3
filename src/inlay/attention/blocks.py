"""A plan as work for backends that make one call per work item.

Rows of several sequences that read the same run at the same shift form one work item (the chunk-first phase of
ChunkAttention, arXiv 2402.15220, section 3.3, generalized to sharing sets that are no prefixes); an item with the rows
of one sequence alone is sequence-first work. Work items of the same rows stand together in a block, because a block's
partial results are merged in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inlay.attention.plan import Piece, Plan, Span, pieces_at
from inlay.kv.pool import cut


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


class Blocks:
    """A plan's blocks, in the order in which partial results are merged."""

    def __init__(self, plan: Plan) -> None:
        self._own_slots = [span.slots[0].first for span in plan.spans]
        self.blocks = _blocks(plan.spans, plan.share)

    def advance(self) -> None:
        """See Work.advance. The item that ends in a row's own slot grows by the next one."""
        grown = set(self._own_slots)
        for block in self.blocks:
            block.memo.clear()
            for item in block.items:
                if item.first + item.length - 1 in grown and item.shift == 0:
                    item.length += 1
                    start, count = item.starts[-1]
                    item.starts[-1] = (start, count + 1)
        self._own_slots = [slot + 1 for slot in self._own_slots]


def _blocks(spans: Sequence[Span], share: bool) -> list[Block]:
    groups: dict[tuple[int, Piece, bool], list[tuple[int, int]]] = {}
    row = 0
    for number, span in enumerate(spans):
        owner = 0 if share else number
        for piece in span.context:
            groups.setdefault((owner, piece, False), []).append((row, row + span.length))
        for piece, causal, first, last in _own_pieces(span):
            groups.setdefault((owner, piece, causal), []).append((row + first, row + last))
        row += span.length
    by_rows: dict[tuple[tuple[int, int], ...], list[tuple[Piece, bool]]] = {}
    for (_, piece, causal), stretches in groups.items():
        by_rows.setdefault(_join_rows(stretches), []).append((piece, causal))
    return [Block(_row_index(rows), _merge_neighbours(keys)) for rows, keys in by_rows.items()]


def _own_pieces(span: Span) -> Iterable[tuple[Piece, bool, int, int]]:
    """A span's own keys as (piece, causal, first row, row behind the last): the diagonal, and what lies below it."""
    for piece in pieces_at(cut(span.slots, 0, span.length), span.start):
        first, last = piece.start - span.start, piece.end - span.start
        yield piece, piece.run.length > 1, first, last
        if last < span.length:
            yield piece, False, last, span.length


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
