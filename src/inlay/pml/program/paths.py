"""Paths through a program: their text, the bindings of names, and the points where paths part and meet.

A path appends pieces to its ``sink``. At a condition on arguments, each branch continues in its own section. If every
branch reaches its end, the path continues as before. If some branches return, the rest goes into the section of the
only remaining branch. If several branches remain, the rest goes into a new section for their cases.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from inlay.errors import Place
from inlay.pml.program.cases import (
    ALWAYS,
    Case,
    Cases,
    both,
    case_label,
    joined,
    leaves,
    merged,
    narrowed,
    short_cases,
)
from inlay.pml.program.constants import is_symbolic, kind
from inlay.pml.program.inputs import Input, Selected, SetArgument, Template, TextArgument, position
from inlay.pml.program.runtime import Program
from inlay.pml.program.values import (
    Binding,
    Deferred,
    Evaluator,
    Frame,
    Settled,
    Unsettled,
    UntranslatableError,
    direct,
)
from inlay.wording import shown_python


@dataclass(frozen=True, slots=True)
class Said:
    """The output of one ``yield``: text with holes for arguments."""

    parts: tuple[str | TextArgument, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """A future module.

    Attributes:
        label: Its name, unless that is taken.
        cases: The cases in which it is imported, provided that the section around it is.
        is_call: It is the call of another program. Its name then prefixes the names of all sections in it.
    """

    label: str
    place: Place
    cases: Cases = ALWAYS
    is_call: bool = False
    body: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Either:
    """Sections that exclude each other: a future union."""

    sections: tuple[SectionPlan, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Spoken:
    """A chat turn."""

    role: str
    place: Place
    body: list[Piece] = field(default_factory=list)


Piece = Said | SectionPlan | Either | Spoken


def says_anything(piece: Piece) -> bool:
    """Return True if the piece holds text or is a chat turn."""
    if isinstance(piece, Said):
        return bool(piece.parts)
    if isinstance(piece, Spoken):
        return True
    return any(map(says_anything, piece.sections if isinstance(piece, Either) else piece.body))


class Where(Enum):
    """The construct around a path."""

    TOP = "nothing"
    TURN = "a chat turn"
    MODULE = "a module"


@dataclass(slots=True)
class Path:
    """One way through a program, up to the current statement of the translation.

    Attributes:
        known: The answers of a call that are known here.
        alive: The cases in which the program gets here from the start of the path.
    """

    sink: list[Piece]
    frame: Frame
    known: Case
    where: Where
    alive: Cases = ALWAYS

    def inside(self, section: SectionPlan) -> Path:
        """Return a path that begins here, in a section."""
        return Path(section.body, self.frame, narrowed(self.known, section.cases), Where.MODULE)

    def go_on(self, path: Path) -> None:
        """Continue at the end of another path."""
        self.sink, self.frame, self.known, self.where = path.sink, path.frame, path.known, path.where


def refuse(node: ast.AST, path: Path, message: str) -> NoReturn:
    """Raise Refused for a node on the path."""
    raise UntranslatableError(path.frame.source.place(node), message)


@dataclass(frozen=True, slots=True)
class Branch:
    """Code that runs in some cases. ``is_else``: the branch has no condition."""

    cases: Cases
    run: Callable[[Path], None]
    place: Place
    is_else: bool = False


def fork(path: Path, branches: Sequence[Branch]) -> None:
    """Take every branch on a separate path. Exactly one branch runs in a call."""
    if len(branches) == 1:
        branches[0].run(path)
        return
    sections: list[SectionPlan] = []
    ends: list[Path] = []
    asked: list[Case] = []
    for branch in branches:
        cases = short_cases(branch.cases, [] if branch.is_else else asked, path.known)
        asked += cases
        section = SectionPlan(case_label(cases), branch.place, branch.cases)
        end = path.inside(section)
        branch.run(end)
        sections.append(section)
        ends.append(end)
    path.sink.append(Either(tuple(sections), branches[0].place))
    _meet(path, branches, ends)


def leave_turn(path: Path, end: Path, place: Place) -> None:
    """Continue after a chat turn, from the end of the path in it."""
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
    """Put the following pieces into a section for the cases in which one of the paths reaches its end."""
    if ends and alive:
        section = SectionPlan(case_label(short_cases(alive, [], path.known)), place, alive)
        path.sink.append(section)
        path.go_on(Path(section.body, _common_frame(ends), joined([end.known for end in ends]), Where.MODULE))


def _common_frame(ends: Sequence[Path]) -> Frame:
    """Return the bindings where paths meet. A name that one path has assigned becomes Unsettled."""
    frame = ends[0].frame
    for name in dict.fromkeys(name for end in ends for name in end.frame.scope):
        if len({id(end.frame.scope.get(name)) for end in ends}) > 1:
            message = f"{name} is assigned in a branch that hangs on an argument; write {name} = … if … else …"
            frame = frame.bound(name, Unsettled(message))
    return frame


def assign(statement: ast.Assign, path: Path) -> None:
    """Translate ``title = …``."""
    for target in statement.targets:
        _assign_expression(target, statement.value, path)


def assign_annotated(statement: ast.AnnAssign, path: Path) -> None:
    """Translate ``title: str = …``."""
    if statement.value is not None:
        _assign_expression(statement.target, statement.value, path)


def assign_augmented(statement: ast.AugAssign, path: Path) -> None:
    """Translate ``title += …`` for values that it does not change in place."""
    target = statement.target
    if not isinstance(target, ast.Name):
        refuse(target, path, "an assignment to a part of something; assign to a name")
    before = ast.copy_location(ast.Name(target.id, ast.Load()), target)
    _, values = bind_value(before, path.frame, path.known)
    if any(isinstance(value, list | dict | set) for value in values):
        refuse(statement, path, f"{target.id} is changed in place; write {target.id} = {target.id} + …")
    combined = ast.BinOp(before, statement.op, statement.value)
    _assign_expression(target, ast.copy_location(combined, statement), path)


def assign_value(target: ast.expr, value: Any, path: Path) -> None:
    """Assign a known value to a name, or its elements to several names."""
    if isinstance(target, ast.Name):
        path.frame = path.frame.bound(target.id, Settled(value))
        return
    if not isinstance(target, ast.Tuple | ast.List):
        refuse(target, path, "an assignment to a part of something; assign to a name")
    values = value if isinstance(value, tuple | list | str) else ()
    if len(values) != len(target.elts):
        refuse(target, path, f"{len(target.elts)} names for another number of values; write a name for each")
    for part, one in zip(target.elts, values, strict=True):
        assign_value(part, one, path)


def bind_value(node: ast.expr, frame: Frame, known: Case) -> tuple[Binding, list[Any]]:
    """Return the binding for a name that an expression is assigned to, and all values that it can have."""
    found = leaves(lambda at: Evaluator(frame, at, set()).value(node), known)
    values = [value for _, value in found]
    return (Settled(values[0]) if len(values) == 1 else Deferred(node, frame)), values


def _assign_expression(target: ast.expr, node: ast.expr, path: Path) -> None:
    binding, _ = bind_value(node, path.frame, path.known)
    if isinstance(target, ast.Name):
        path.frame = path.frame.bound(target.id, binding)
    elif isinstance(binding, Settled):
        assign_value(target, binding.value, path)
    else:
        refuse(target, path, "several names are assigned what hangs on an argument; assign them one by one")


def bind_call(program: Program[...], node: ast.Call, frame: Frame, known: Case) -> dict[str, Binding]:
    """Bind the arguments of a called program. Raises Refused for a call that does not fit."""
    definition = program.definition
    place = frame.source.place(node)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    if len(keywords) < len(node.keywords):
        raise UntranslatableError(place, "** in a call; write the arguments one by one")
    try:
        bound = definition.signature.bind(*node.args, **keywords)
    except TypeError as error:
        raise UntranslatableError(place, f"{error}; call it as {definition.usage}") from None
    bindings: dict[str, Binding] = {}
    for name, parameter in definition.signature.parameters.items():
        if name in bound.arguments:
            bindings[name] = _binding(definition.inputs[name], bound.arguments[name], frame, known)
        else:
            bindings[name] = Settled(parameter.default)
    return bindings


def _binding(one: Input, node: ast.expr, frame: Frame, known: Case) -> Binding:
    binding, values = bind_value(node, frame, known)
    for value in values:
        if objection := _objection(one, value):
            given = kind(value) if is_symbolic(value) else shown_python(value)
            raise UntranslatableError(frame.source.place(node), f"'{one.name}' is {given}; {objection}")
    return binding


def _objection(one: Input, value: object) -> str | None:
    """Return the reason why the called program does not take this value, or None.

    The value may be an argument of the calling program.
    """
    if isinstance(one, TextArgument) and isinstance(value, Template):
        words = direct(value)
        if words is None:
            return "it must be a constant, or a text argument with nothing around it"
        if words.length > one.length:
            return f"it may have {words.length} tokens, and must be {one.allowed}"
        return None
    if isinstance(one, SetArgument) and isinstance(value, Selected):
        wrong = [held for held in value.selection.values if position(one.values, held) is None]
        return f"it may hold {shown_python(wrong[0])}, and must be {one.allowed}" if wrong else None
    if is_symbolic(value):
        return f"it must be {one.allowed}"
    return one.objection(value)
