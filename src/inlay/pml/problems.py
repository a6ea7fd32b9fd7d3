"""Collects the problems of a document, so that one error can report several of them with their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from inlay.errors import Place, PMLError, Problem
from inlay.pml.nodes import MAX_PROBLEMS, ROLES
from inlay.wording import SHOWN, quote

_KEPT = 1_000  # enough to sort the problems that are shown; further problems are only counted
_CANDIDATES = 2_000  # comparing names is slow, and a suggestion is optional


class StopReadingError(Exception):
    """Ends the reading of a document after a problem that has been reported."""


@dataclass(frozen=True, slots=True)
class JSONPlace(Place):
    """A place in JSON, as in ``trip.json: content[1].user.content[0].module "plan".len``."""

    path: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source

    def key(self, key: str) -> JSONPlace:
        """Return the place of a key's value in this object."""
        return self._longer(f".{key}" if self.path else key)

    def index(self, index: int) -> JSONPlace:
        """Return the place of a member of this list."""
        return self._longer(f"[{index}]")

    def entry(self, name: str) -> JSONPlace:
        """Return the place of a name's value in this object of arguments or metadata."""
        return self._longer(f" {quote(name)}")

    def named(self, kind: str, name: str) -> JSONPlace:
        """Return this place with the object's kind and name added."""
        return self.key(kind).entry(name)

    def of(self, value: Mapping[str, Any]) -> JSONPlace:
        """Return this place with the kind and name of its object, as far as the object has them."""
        for kind in ("module", "param", "import", "name"):
            if isinstance(name := value.get(kind), str):
                return self.named("import" if kind == "name" else kind, name)
        return self.key(value["role"]) if value.get("role") in ROLES else self

    def _longer(self, part: str) -> JSONPlace:
        return JSONPlace(self.source, path=self.path + part)


def whereabouts(place: Place) -> str:
    """Format the place within its source, as a part of a sentence."""
    return f"at {place.path}" if isinstance(place, JSONPlace) else f"in line {place.line}"


class Problems:
    """The problems found so far in one schema or prompt."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._problems: list[Problem] = []
        self._count = 0

    def add(self, place: Place, message: str, *, code: str) -> None:
        """Add a problem. Its code names the kind of mistake."""
        self._count += 1
        if len(self._problems) < _KEPT:
            self._problems.append(Problem(place, message, code=code))

    def near(self, name: str, candidates: Iterable[str]) -> str | None:
        """Return the candidate that is most similar to ``name``.

        Returns None if no candidate is similar, if the name is too long, or if the problem would not be shown.
        """
        if self._count >= MAX_PROBLEMS or len(name) > SHOWN:
            return None
        names = list(islice(candidates, _CANDIDATES))
        # difflib scores swapped letters, the most common slip, low
        letters = sorted(name.casefold())
        swapped = [candidate for candidate in names if sorted(candidate.casefold()) == letters]
        return next(iter(swapped or get_close_matches(name, names, n=1)), None)

    def raise_any(self) -> None:
        """Raise PMLError if there is any problem. It shows the first MAX_PROBLEMS and counts the others."""
        if not self._problems:
            return
        shown = sorted(self._problems, key=_position) if self._one_source() else self._problems
        shown = shown[:MAX_PROBLEMS]
        if hidden := self._count - len(shown):
            more = "1 more problem is" if hidden == 1 else f"{hidden} more problems are"
            shown = [
                *shown,
                Problem(Place(self.source), f"{more} not shown; correct these first", code="pml.more_problems"),
            ]
        raise PMLError(shown)

    def _one_source(self) -> bool:
        return len({problem.place.source for problem in self._problems}) == 1


def _position(problem: Problem) -> tuple[int, int]:
    return problem.place.line or 0, problem.place.column or 0
