"""A translated program: what it says, and which pieces hang on which answers. It becomes a schema in build.py.

What the names in a program stand for, at one point of it.

Paths through a program: where they part, and where they meet again.

A path puts what it says into its ``sink``. Where a condition hangs on arguments, each branch goes on in a section of
its own. If all of them come back, the path goes on as before. If some have returned, what follows is said where the
only other branch is, or, where there are several, in one more section for their cases.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn

from inlay.errors import Place
from inlay.pml.program.inputs import (
    ALWAYS,
    Case,
    Cases,
    Input,
    Words,
    both,
    case_label,
    joined,
    merged,
    narrowed,
    short_cases,
)
from inlay.pml.program.source import Outside, Source


@dataclass(frozen=True, slots=True)
class Said:
    """What one ``yield`` says: text, with holes for arguments."""

    parts: tuple[str | Words, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Section:
    """A module to be.

    label: its name, unless that is taken.
    cases: in which it is imported, where the section around it is.
    is_call: whether it is the call of another program, whose name stands in front of those of all sections in it.
    """

    label: str
    place: Place
    cases: Cases = ALWAYS
    is_call: bool = False
    body: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Either:
    """Sections that exclude each other: a union to be."""

    sections: tuple[Section, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Spoken:
    """A chat turn."""

    role: str
    place: Place
    body: list[Piece] = field(default_factory=list)


Piece = Said | Section | Either | Spoken


def says_anything(piece: Piece) -> bool:
    """Whether there is any text in it, or a chat turn."""
    if isinstance(piece, Said):
        return bool(piece.parts)
    if isinstance(piece, Spoken):
        return True
    return any(map(says_anything, piece.sections if isinstance(piece, Either) else piece.body))


class Refused(Exception):  # noqa: N818  # carries a problem to the statement that it is in
    """An expression cannot be translated. ``message`` is None where the cause has been reported already."""

    def __init__(self, place: Place, message: str | None) -> None:
        self.place = place
        self.message = message


@dataclass(frozen=True, slots=True)
class Given:
    """A name stands for an argument of the program."""

    input: Input


@dataclass(frozen=True, slots=True)
class Settled:
    """A name stands for a value that is known."""

    value: Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """A name stands for an expression that hangs on answers, seen from where it was written."""

    node: ast.expr
    frame: Frame


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A name has no one value here; None where the cause has been reported already."""

    message: str | None


Binding = Given | Settled | Deferred | Unsettled


@dataclass(frozen=True, slots=True)
class Frame:
    """What the names in a program stand for, at one point of it."""

    source: Source
    outside: Outside
    local_names: frozenset[str]
    scope: Mapping[str, Binding]

    def bound(self, name: str, binding: Binding) -> Frame:
        """The frame behind an assignment."""
        return replace(self, scope={**self.scope, name: binding})


class Where(Enum):
    """What is around a path."""

    TOP = "nothing"
    TURN = "a chat turn"
    MODULE = "a module"


@dataclass(slots=True)
class Path:
    """One way through a program, up to where the translation is.

    known: what is settled here about the answers of a call.
    alive: in which cases the program comes to here, if it came to where the path began.
    """

    sink: list[Piece]
    frame: Frame
    known: Case
    where: Where
    alive: Cases = ALWAYS

    def inside(self, section: Section) -> Path:
        """A path that begins here, in a section."""
        return Path(section.body, self.frame, narrowed(self.known, section.cases), Where.MODULE)

    def go_on(self, path: Path) -> None:
        """Continue where another path ended."""
        self.sink, self.frame, self.known, self.where = path.sink, path.frame, path.known, path.where


def refuse(node: ast.AST, path: Path, message: str) -> NoReturn:
    """Raise Refused for a node that the path has come to."""
    raise Refused(path.frame.source.place(node), message)


@dataclass(frozen=True, slots=True)
class Branch:
    """What runs in some cases. is_else: whether nothing was asked to come here."""

    cases: Cases
    run: Callable[[Path], None]
    place: Place
    is_else: bool = False


def fork(path: Path, branches: Sequence[Branch]) -> None:
    """Take every branch on a path of its own. There is always one of them that runs."""
    if len(branches) == 1:
        branches[0].run(path)
        return
    sections: list[Section] = []
    ends: list[Path] = []
    asked: list[Case] = []
    for branch in branches:
        cases = short_cases(branch.cases, [] if branch.is_else else asked, path.known)
        asked += cases
        section = Section(case_label(cases), branch.place, branch.cases)
        end = path.inside(section)
        branch.run(end)
        sections.append(section)
        ends.append(end)
    path.sink.append(Either(tuple(sections), branches[0].place))
    _meet(path, branches, ends)


def leave_turn(path: Path, end: Path, place: Place) -> None:
    """Go on behind a chat turn, where the path in it has ended."""
    path.frame = end.frame
    if end.alive != ALWAYS:
        path.alive = both(path.alive, end.alive)
        _go_on_in_section(path, end.alive, [end], place)


def _meet(path: Path, branches: Sequence[Branch], ends: Sequence[Path]) -> None:
    going = [end for end in ends if end.alive]
    if all(end.alive == ALWAYS for end in ends):
        path.frame = _common_frame(going)
        return
    begun = zip(branches, ends, strict=True)
    alive = tuple(case for branch, end in begun for case in both(branch.cases, end.alive))
    path.alive = both(path.alive, alive)
    if len(going) == 1:
        path.go_on(going[0])
    else:
        _go_on_in_section(path, merged(alive, path.known), going, branches[0].place)


def _go_on_in_section(path: Path, alive: Cases, ends: Sequence[Path], place: Place) -> None:
    """Say what follows in a section for the cases in which one of the paths has come to its end."""
    if ends and alive:
        section = Section(case_label(short_cases(alive, [], path.known)), place, alive)
        path.sink.append(section)
        path.go_on(Path(section.body, _common_frame(ends), joined([end.known for end in ends]), Where.MODULE))


def _common_frame(ends: Sequence[Path]) -> Frame:
    """What names stand for where paths meet; those that one of them has assigned stand for nothing certain."""
    frame = ends[0].frame
    for name in dict.fromkeys(name for end in ends for name in end.frame.scope):
        if len({id(end.frame.scope.get(name)) for end in ends}) > 1:
            message = f"{name} is assigned in a branch that hangs on an argument; write {name} = … if … else …"
            frame = frame.bound(name, Unsettled(message))
    return frame
