"""Sets: parts of a prompt whose order is free, as data. The engine chooses the order, by what is stored.

A set is neighbouring tokens of a prompt, in members that may change places; all else stays where it is. Where the
order is not free after all, the set says why, and its members stay as they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from inlay.errors import ParameterError
from inlay.pml.nodes import MAX_SET
from inlay.policy import ReusePolicy


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


def check_sets(sets: Sequence[FreeSet], starts: Sequence[int], end: int) -> None:
    """Raises ParameterError where sets don't follow each other, or parts of the prompt stand across their borders.

    starts: the positions of the prompt's parts. end: behind the last one.
    """
    known, at = {*starts, end}, 0
    for each in sorted((each for each in sets if not each.why_fixed), key=lambda each: each.start):
        borders = each.borders
        if (
            len(each.members) > MAX_SET
            or borders[0] < at
            or not known.issuperset(borders)
            or borders != sorted(borders)
        ):
            raise ParameterError("the request is damaged (a set of it is none); send it again")
        at = borders[-1]


def members_of(parts: Sequence[_P], of: FreeSet) -> list[tuple[_P, ...]]:
    """The parts of each member. parts: of the prompt, none of which stands across a border of the set."""
    borders = of.borders
    inside = [part for part in parts if part.ids and borders[0] <= part.start < borders[-1]]
    return [tuple(part for part in inside if first <= part.start < end) for first, end in pairwise(borders)]


def placed_at(parts: Sequence[_P], start: int) -> list[_P]:
    """Neighbouring parts, the first of them at this position."""
    made: list[_P] = []
    for part in parts:
        made.append(part if part.start == start else replace(part, start=start))  # type: ignore[type-var]
        start += len(part.ids)
    return made


def reordered(parts: Sequence[_P], of: FreeSet, order: Sequence[int]) -> tuple[_P, ...]:
    """A prompt's parts with the members of one set in this order. order: numbers of members."""
    members, end = members_of(parts, of), of.start + of.tokens
    inside = [part for number in order for part in members[number]]
    before = [part for part in parts if part.start < of.start]
    behind = [part for part in parts if part.start >= end]
    return (*before, *placed_at(inside, of.start), *behind)


def reordered_text(text: str, of: FreeSet, order: Sequence[int]) -> str:
    """A prompt's text in the same way."""
    at, pieces = of.text_start, []
    for member in of.members:
        pieces.append(text[at : at + member.characters])
        at += member.characters
    return text[: of.text_start] + "".join(pieces[number] for number in order) + text[at:]
