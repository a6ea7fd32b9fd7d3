"""A translated program → the nodes of its schema, and what a call imports of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from inlay.errors import Place
from inlay.pml.limits import MAX_DEPTH, MAX_ELEMENTS
from inlay.pml.nodes import Argument, Import, Module, Param, Text, Turn, Union, numbered
from inlay.pml.problems import Problems
from inlay.pml.program.cases import Cases, Question, holds
from inlay.pml.program.inputs import Words
from inlay.pml.program.names import Names, argument_label, path_label
from inlay.pml.program.tree import Piece, Said, Section, Spoken, says_anything

_Node = Text | Param | Module | Union | Turn


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the schema, as a call sees it.

    cases: in which it is imported, where the module around it is.
    holes: the names of its parameters, each with the argument that fills it.
    """

    name: str
    cases: Cases
    holes: tuple[tuple[str, Words], ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A schema's children, numbered, and its modules as calls see them."""

    children: tuple[Text | Module | Union | Turn, ...]
    parts: tuple[Part, ...]


def build(pieces: Iterable[Piece], problems: Problems) -> Built:
    """The schema of a program; one that is larger than a schema can be goes to ``problems``."""
    top = _Level(_Shared(Names(), problems, set()), "", 1)
    for piece in pieces:
        top.add(piece)
    children = tuple(node for node in top.nodes if not isinstance(node, Param))  # at the top level there is none
    return Built(numbered(children), tuple(top.parts))


def imports(
    parts: Iterable[Part], answers: Mapping[Question, int], texts: Mapping[str, str], place: Place
) -> tuple[Import, ...]:
    """What a call imports. texts: its text arguments; those that equal a default are left to the schema, which has
    their states cached.
    """
    return tuple(
        Import(
            part.name,
            tuple(
                Argument(name, texts[words.name], place)
                for name, words in part.holes
                if texts[words.name] != words.default
            ),
            imports(part.parts, answers, texts, place),
            place,
        )
        for part in parts
        if holds(part.cases, answers)
    )


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all levels of a schema have in common."""

    names: Names
    problems: Problems
    refused: set[str]

    def refuse(self, place: Place, message: str) -> None:
        """Report a limit that is passed, once."""
        if message not in self.refused:
            self.problems.add(place, message)
        self.refused.add(message)


class _Level:
    """One level of a schema: its top, a chat turn, or the inside of a module.

    prefix: what stands in front of the names of modules, for the calls around them.
    depth: how many tags there are around it.
    """

    def __init__(self, shared: _Shared, prefix: str, depth: int) -> None:
        self.nodes: list[_Node] = []
        self.parts: list[Part] = []
        self.holes: dict[str, Words] = {}
        self._shared = shared
        self._names = Names()  # of parameters
        self._prefix = prefix
        self._depth = depth

    def add(self, piece: Piece) -> None:
        """Put a piece behind those that are there, if it says anything."""
        if isinstance(piece, Said):
            for part in piece.parts:
                self._say(part, piece.place)
        elif isinstance(piece, Spoken):
            self._turn(piece)
        elif says_anything(piece):
            sections = [piece] if isinstance(piece, Section) else list(filter(says_anything, piece.sections))
            deeper = self._depth + (len(sections) > 1)
            modules = tuple(self._module(section, deeper) for section in sections)
            self.nodes.append(modules[0] if len(modules) == 1 else Union(modules, piece.place))

    def _say(self, part: str | Words, place: Place) -> None:
        last = self.nodes[-1] if self.nodes else None
        if isinstance(part, Words):
            name = self._names.unique(argument_label([part.name]))
            self.holes[name] = part
            self.nodes.append(Param(name, part.length, part.default, place))
        elif isinstance(last, Text):
            # one run, as in PML: it is tokenized as one
            self.nodes[-1] = Text(last.text + part, last.place)
        else:
            self.nodes.append(Text(part, place))

    def _module(self, section: Section, depth: int) -> Module:
        name = self._shared.names.unique(path_label(self._prefix, section.label))
        self._check_size(section.place, depth + 1)
        inside = _Level(self._shared, f"{name}." if section.is_call else self._prefix, depth + 1)
        for piece in section.body:
            inside.add(piece)
        self.parts.append(Part(name, section.cases, tuple(inside.holes.items()), tuple(inside.parts)))
        children = tuple(node for node in inside.nodes if not isinstance(node, Turn))  # there is none
        return Module(name, children, section.place)

    def _turn(self, spoken: Spoken) -> None:
        inside = _Level(self._shared, self._prefix, self._depth + 1)
        for piece in spoken.body:
            inside.add(piece)
        self.parts += inside.parts
        children = tuple(node for node in inside.nodes if not isinstance(node, Param | Turn))  # there is neither
        self.nodes.append(Turn(spoken.role, children, spoken.place))

    def _check_size(self, place: Place, depth: int) -> None:
        # a parameter in the module is one level more
        if depth >= MAX_DEPTH:
            message = (
                f"the program nests more than {MAX_DEPTH} deep; write if … elif … in place of returns, or fewer calls"
            )
            self._shared.refuse(place, message)
        if len(self._shared.names) == MAX_ELEMENTS:
            self._shared.refuse(place, f"the program becomes more than {MAX_ELEMENTS:,} modules; split it")
