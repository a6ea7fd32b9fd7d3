"""Sets: parts of a prompt whose order is free, as data. The engine chooses the order, by what is stored.

A set is neighbouring tokens of a prompt, in members that may change places; all else stays where it is. Where the
order is not free after all, the set says why, and its members stay as they stand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from inlay.errors import ParameterError
from inlay.pml.nodes import MAX_SET
from inlay.policy import ReusePolicy

#: How many sets of one prompt may be free: each of them is looked for in what is stored.
MAX_SETS = 256


@dataclass(frozen=True, slots=True)
class Member:
    """What a set holds. name: what outputs call it. tokens, characters: how long it is, and its text."""

    name: str
    tokens: int = 0
    characters: int = 0


@dataclass(frozen=True, slots=True)
class FreeSet:
    """Neighbouring members of a prompt.

    start: the position of the first token, and text_start: the index of the first character of the prompt's text.
    why_fixed: the reason why the order is the one in which they stand; "" where it is free. Members of one that is not
        have no length.
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
        """The positions at which its members start, and where the last one ends."""
        at = [self.start]
        for member in self.members:
            at.append(at[-1] + member.tokens)
        return at

    def fixed(self, why: str) -> FreeSet:
        """The same set in the order in which it stands; the first reason stays."""
        return self if self.why_fixed else replace(self, why_fixed=why)


#: That of a message which says that its order is free, and has nothing that could change places.
NOT_IN_PARTS = FreeSet((), why_fixed="no two neighbouring parts of its message are marked with cache_control")
#: The same of a message whose content cannot be cut out.
NOT_CUT_OUT = FreeSet((), why_fixed="the chat template writes its message in a way of its own")


class _Part(Protocol):
    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def start(self) -> int: ...


_P = TypeVar("_P", bound=_Part)


def why_not_free(policy: ReusePolicy, *, scored: bool, movable: bool) -> str:
    """The reason why a request's sets have the order that is written; "" where the engine may choose.

    scored: whether it asks for its prompt's log-probabilities. movable: whether its modules may stand elsewhere.
    """
    if scored:
        return "all of a prompt is computed where prompt_logprobs is asked for"
    if not policy.chooses_order:
        return f"reuse '{policy}' is the same whatever is stored"
    return "" if movable else "this model reads modules at their own positions alone"


def check_count(sets: Sequence[FreeSet]) -> None:
    """Raises ParameterError where a prompt has more free sets than one may have."""
    free = sum(not each.why_fixed for each in sets)
    if free > MAX_SETS:
        raise ParameterError(
            f"the prompt has {free:,} sets whose order is free, and may have {MAX_SETS}; leave the order of the others "
            "as it is written"
        )


def check_sets(sets: Sequence[FreeSet], starts: Sequence[int], end: int) -> None:
    """Raises ParameterError where sets don't follow each other, or parts of the prompt stand across their borders.

    starts: the positions of the prompt's parts. end: behind the last one.
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
            raise ParameterError("the request is damaged (a set of it is none); send it again")
        at = borders[-1]


def in_line(sets: Iterable[FreeSet]) -> list[FreeSet]:
    """Sets as they stand in a prompt, from first to last."""
    return sorted(sets, key=lambda each: each.start)


def cut_at(parts: Iterable[_P], sets: Sequence[FreeSet]) -> tuple[list[tuple[_P, ...]], list[list[tuple[_P, ...]]]]:
    """What stands in front of each set and behind the last one, and the parts of each member of each set.

    parts: of the prompt, none of which stands across a border. sets: as ``in_line`` has them.
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
    """Neighbouring parts, the first of them at this position."""
    made: list[_P] = []
    for part in parts:
        made.append(part if part.start == start else replace(part, start=start))  # type: ignore[type-var]
        start += len(part.ids)
    return made


def reordered(parts: Iterable[_P], sets: Sequence[FreeSet], orders: Sequence[Sequence[int]]) -> tuple[_P, ...]:
    """A prompt's parts with the members of each set in its order. sets: as ``in_line`` has them. orders: numbers of
    members."""
    between, inside = cut_at(parts, sets)
    made = list(between[0])
    for each, order, members, behind in zip(sets, orders, inside, between[1:], strict=True):
        made += placed_at([part for number in order for part in members[number]], each.start)
        made += behind
    return tuple(made)


def reordered_text(text: str, sets: Sequence[FreeSet], orders: Sequence[Sequence[int]]) -> str:
    """A prompt's text in the same way."""
    at, pieces = 0, []
    for each, order in zip(sets, orders, strict=True):
        pieces.append(text[at : each.text_start])
        at, members = each.text_start, []
        for member in each.members:
            members.append(text[at : at + member.characters])
            at += member.characters
        pieces += [members[number] for number in order]
    return "".join(pieces) + text[at:]
