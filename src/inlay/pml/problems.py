"""Collects problems, so that one error can report several of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

from inlay.errors import Place, PMLError, Problem
from inlay.pml.nodes import MAX_PROBLEMS

_KEPT = 1_000  # enough to sort what is shown; the rest is only counted
_CANDIDATES = 2_000  # comparing names is slow, and near names are a courtesy
_SHOWN = 60  # characters of a quoted value


def clip(value: str) -> str:
    """The value, shortened so that a message stays readable."""
    return value if len(value) <= _SHOWN else value[: _SHOWN - 1] + "…"


def quote(value: str) -> str:
    """The value in quotation marks, on one line, shortened where it is long."""
    return '"' + " ".join(clip(value).splitlines()) + '"'


def shown_path(path: str) -> str:
    """A file as messages name it: relative to the working folder where it is inside."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the working folder is gone
        return path


def lone_surrogate(text: str) -> str | None:
    """What keeps this text from being written in UTF-8, and the remedy; None if nothing does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate at index {error.start}; decode the text properly or leave it out"
    return None


def listed(names: Iterable[str]) -> str:
    """The first few names, separated by commas."""
    first = [clip(name) for name in islice(names, 9)]
    return ", ".join([*first[:8], "…"] if len(first) > 8 else first)


class Problems:
    """The problems found so far in one schema or prompt."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._problems: list[Problem] = []
        self._count = 0

    def add(self, place: Place, message: str) -> None:
        self._count += 1
        if len(self._problems) < _KEPT:
            self._problems.append(Problem(place, message))

    def near(self, name: str, candidates: Iterable[str]) -> str | None:
        """The candidate that looks most like ``name``, if one does and the problem can still be shown."""
        if self._count >= MAX_PROBLEMS or len(name) > _SHOWN:
            return None
        names = list(islice(candidates, _CANDIDATES))
        # difflib thinks little of swapped letters, the commonest slip
        letters = sorted(name.casefold())
        swapped = [candidate for candidate in names if sorted(candidate.casefold()) == letters]
        return next(iter(swapped or get_close_matches(name, names, n=1)), None)

    def raise_any(self) -> None:
        """Raise PMLError if there is any problem; the first ones are shown, the others counted."""
        if not self._problems:
            return
        shown = sorted(self._problems, key=_position) if self._one_source() else self._problems
        shown = shown[:MAX_PROBLEMS]
        if hidden := self._count - len(shown):
            more = "1 more problem is" if hidden == 1 else f"{hidden} more problems are"
            shown = [*shown, Problem(Place(self.source), f"{more} not shown; correct these first")]
        raise PMLError(shown)

    def _one_source(self) -> bool:
        return len({problem.place.source for problem in self._problems}) == 1


def _position(problem: Problem) -> tuple[int, int]:
    return problem.place.line or 0, problem.place.column or 0
