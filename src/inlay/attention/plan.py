"""The plan: which query rows of one forward pass read which stored keys, and turned by how much.

A plan says what is asked for: spans of new tokens and the stored pieces that they attend to. Each backend turns it
into work of its own, once, and keeps that with the plan (``Plan.work``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from inlay.kv.pool import Run, cut


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


class Work(Protocol):
    """What a backend has made of a plan."""

    def advance(self) -> None:
        """Every row stands one position and one slot further on, and sees what it wrote last."""
        ...


@dataclass(slots=True)
class Plan:
    """One forward pass's attention.

    spans: what is asked for, one after the other in row order; the specification.
    positions: (rows,) int64, of the query rows.
    slots: where the rows' own keys and values go: one run, or slot numbers (rows,).
    share: whether rows of several sequences that read the same keys may be worked on together (chunk-first).
    work: what backends have made of it, by backend.
    """

    spans: tuple[Span, ...]
    positions: Tensor
    slots: Run | Tensor
    share: bool = True
    work: dict[str, Work] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.positions.numel()


def build_plan(spans: Sequence[Span], *, share: bool = True) -> Plan:
    """The plan of spans of new tokens. share: see Plan."""
    positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans])
    return Plan(tuple(spans), positions, _slots(spans), share)


def advance(plan: Plan, spans: Sequence[Span]) -> Plan:
    """The plan of the next decode step, by growing the last one's work in place: the grouping stays, lengths grow.

    plan: of one token a span; not to be used again. spans: the same sequences one token on, each in the slot behind
    its last one, with that one in its context.
    """
    for work in plan.work.values():
        work.advance()
    slots = Run(plan.slots.first + 1, 1) if isinstance(plan.slots, Run) and plan.rows == 1 else _slots(spans)
    return Plan(tuple(spans), plan.positions + 1, slots, plan.share, plan.work)


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


def _slots(spans: Sequence[Span]) -> Run | Tensor:
    runs = [run for span in spans for run in cut(span.slots, 0, span.length)]
    if all(left.end == right.first for left, right in pairwise(runs)):
        return Run(runs[0].first, sum(run.length for run in runs))
    return torch.cat([torch.arange(run.first, run.end) for run in runs])
