"""Sets: parts of a prompt whose order the engine may choose, by the contents of the store.

A set has neighbouring members that may change places: imports of a schema, or marked parts of a message. The rest of
the prompt stays in place. A set with a fixed order has the reason.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from inlay.errors import ParameterError
from inlay.pml.nodes import MAX_SET
from inlay.policy import ReusePolicy

#: The most free sets of one prompt, because each is looked up in the store.
MAX_SETS = 256


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a set: its name in outputs, and its length in tokens and characters."""

    name: str
    tokens: int = 0
    characters: int = 0


@dataclass(frozen=True, slots=True)
class FreeSet:
    """Neighbouring members of a prompt.

    Args:
        start: the position of the first token.
        text_start: the index of the first character in the prompt's text.
        why_fixed: the reason for a fixed order. "" for a free one. Members of a fixed set have no length.
    """

    members: tuple[Member, ...]
    start: int = 0
    text_start: int = 0
    why_fixed: str = ""

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members)

    @property
    def borders(self) -> list[int]:
        """The start positions of the members, followed by the end of the last one."""
        at = [self.start]
        for member in self.members:
            at.append(at[-1] + member.tokens)
        return at

    def fixed(self, why: str) -> FreeSet:
        """Return the set with a fixed order. An earlier reason stays."""
        return self if self.why_fixed else replace(self, why_fixed=why)


#: For a message with a free order and no parts that could change places.
NOT_IN_PARTS = FreeSet((), why_fixed="no two neighbouring parts of its message are marked with cache_control")
#: For a message whose content cannot be cut out of the rendering.
NOT_CUT_OUT = FreeSet((), why_fixed="the chat template writes its message in a way of its own")


class _Part(Protocol):
    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def start(self) -> int: ...


_P = TypeVar("_P", bound=_Part)


def why_not_free(policy: ReusePolicy, *, scored: bool, movable: bool) -> str:
    """Return the reason why a request's sets keep their order; "" if the engine may choose.

    Args:
        scored: True if the request asks for its prompt's log-probabilities.
        movable: True if the model can read modules at a shift.
    """
    if scored:
        return "all of a prompt is computed where prompt_logprobs or the mean of hidden states is asked for"
    if not policy.chooses_order:
        return f"reuse '{policy}' is the same whatever is stored"
    return "" if movable else "this model reads modules at their own positions alone"


def check_count(sets: Sequence[FreeSet]) -> None:
    """Raise ParameterError for more than MAX_SETS free sets."""
    free = sum(not each.why_fixed for each in sets)
    if free > MAX_SETS:
        raise ParameterError(
            f"the prompt has {free:,} sets whose order is free, and may have {MAX_SETS}; leave the order of the others "
            "as it is written",
            code="prompt.too_many_sets",
        )


def check_sets(sets: Sequence[FreeSet], starts: Sequence[int], end: int) -> None:
    """Raise ParameterError if sets overlap, or a part of the prompt crosses a border of a set.

    Args:
        starts: the start positions of the prompt's parts.
        end: the end of the last one.
    """
    known, at = {*starts, end}, 0
    free = in_line(each for each in sets if not each.why_fixed)
    check_count(free)
    for each in free:
        borders = each.borders
        if (
            len(each.members) > MAX_SET
            or borders[0] < at
            or not known.issuperset(borders)
            or borders != sorted(borders)
        ):
            raise ParameterError("the request is damaged (a set of it is none); send it again", code="request.damaged")
        at = borders[-1]


def in_line(sets: Iterable[FreeSet]) -> list[FreeSet]:
    """Return sets sorted by position."""
    return sorted(sets, key=lambda each: each.start)


def cut_at(parts: Iterable[_P], sets: Sequence[FreeSet]) -> tuple[list[tuple[_P, ...]], list[list[tuple[_P, ...]]]]:
    """Return the parts before, between and behind the sets, and the parts of each member of each set.

    Args:
        parts: of the prompt; none crosses a border of a set.
        sets: in the order of ``in_line``.
    """
    borders = [each.borders for each in sets]
    starts = [each[0] for each in borders]
    between: list[list[_P]] = [[] for _ in range(len(sets) + 1)]
    inside: list[list[list[_P]]] = [[[] for _ in each.members] for each in sets]
    for part in parts:
        number = bisect_right(starts, part.start)
        if not number or part.start >= borders[number - 1][-1]:
            between[number].append(part)
        elif part.ids:
            inside[number - 1][bisect_right(borders[number - 1], part.start) - 1].append(part)
    return list(map(tuple, between)), [list(map(tuple, members)) for members in inside]


def placed_at(parts: Sequence[_P], start: int) -> list[_P]:
    """Move neighbouring parts so that the first starts at this position."""
    made: list[_P] = []
    for part in parts:
        made.append(part if part.start == start else replace(part, start=start))  # type: ignore[type-var]
        start += len(part.ids)
    return made


def reordered(parts: Iterable[_P], sets: Sequence[FreeSet], orders: Sequence[Sequence[int]]) -> tuple[_P, ...]:
    """Return a prompt's parts with the members of each set in its order.

    Args:
        sets: in the order of ``in_line``.
        orders: for each set, the numbers of its members.
    """
    between, inside = cut_at(parts, sets)
    made = list(between[0])
    for each, order, members, behind in zip(sets, orders, inside, between[1:], strict=True):
        made += placed_at([part for number in order for part in members[number]], each.start)
        made += behind
    return tuple(made)


def reordered_text(text: str, sets: Sequence[FreeSet], orders: Sequence[Sequence[int]]) -> str:
    """Return a prompt's text with the members of each set in its order."""
    at, pieces = 0, []
    for each, order in zip(sets, orders, strict=True):
        pieces.append(text[at : each.text_start])
        at, members = each.text_start, []
        for member in each.members:
            members.append(text[at : at + member.characters])
            at += member.characters
        pieces += [members[number] for number in order]
    return "".join(pieces) + text[at:]
