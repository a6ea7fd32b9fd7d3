"""Prompt programs: a typed Python function that yields text is a schema, and a call of it is a prompt.

    @program
    def trip(place: Literal["miami", "tokyo"], vegetarian: bool = False) -> Iterator[str]:
        yield "Plan a trip.\\n"
        if vegetarian:
            yield "The traveller eats no meat.\\n"
        match place:
            case "miami":
                yield "Go to Miami.\\n"
            case "tokyo":
                yield "Go to Tokyo.\\n"

The decorator translates the function's syntax tree once. It reports every part that it cannot translate, with its place
and a remedy. The function still runs as plain Python and yields the text of the prompt. After the prompt programs of
Prompt Cache (arXiv 2311.04934, section 3.2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, overload

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.pml.nodes import MAX_DEPTH, MAX_ELEMENTS, Module, Param, Text, Turn, Union, numbered
from inlay.pml.problems import Problems
from inlay.pml.program.cases import Names, argument_label, path_label
from inlay.pml.program.inputs import Definition, TextArgument, read_inputs
from inlay.pml.program.paths import Piece, Said, SectionPlan, Spoken, says_anything
from inlay.pml.program.runtime import ModuleCall, P, Program
from inlay.pml.program.source import Outside, check_grammar, read_source
from inlay.pml.program.translate import translate
from inlay.pml.schema import Schema
from inlay.wording import shown_path

_Node = Text | Param | Module | Union | Turn


@overload
def program(function: Callable[P, Iterable[str]], /) -> Program[P]: ...
@overload
def program(*, name: str) -> Callable[[Callable[P, Iterable[str]]], Program[P]]: ...
def program(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Make a schema of a function that yields text, and prompts of its calls.

    Args:
        function: The function to decorate.
        name: The name of the schema. The function's name by default.

    Raises:
        PMLError: Parts of the function cannot be translated. The error lists each with its place and a remedy.
        ParameterError: The decorated object is not a function, or ``name`` is empty or not a str.
    """
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ParameterError(
            f"@program(name={name!r}): a schema's name is a str that is not empty", code="parameter.invalid_name"
        )
    if function is None:
        return lambda decorated: _program(decorated, name)
    return _program(function, name)


def _program(function: Callable[P, Iterable[str]], name: str | None) -> Program[P]:
    definition, problems = _definition(_plain_function(function))
    try:
        flagged = check_grammar(definition.body, definition.source, problems)
        pieces = translate(definition, flagged, problems)
        problems.raise_any()
        built = build(pieces, problems)
    except RecursionError:
        problems.add(
            definition.source.place(definition.node), "the program nests too deeply; split it", code="pml.too_deep"
        )
    problems.raise_any()
    schema = Schema(name or definition.name, built.children, (), definition.source.file)
    return Program(function, definition, schema, built.parts)


def _definition(function: FunctionType) -> tuple[Definition, Problems]:
    """Read the definition of the function, and report problems of its signature."""
    source, node = read_source(function)
    outside = Outside.of(function)
    problems = Problems(source.file)
    if not inspect.isgeneratorfunction(function):
        problems.add(
            source.place(node),
            f'program {function.__name__} yields no text; write yield "…"',
            code="pml.program_without_text",
        )
    code = function.__code__
    definition = Definition(
        name=function.__name__,
        home=(function.__module__, function.__qualname__),
        source=source,
        node=node,
        outside=outside,
        local_names=frozenset(code.co_varnames + code.co_cellvars),
        signature=inspect.signature(function),
        inputs=read_inputs(function, node, source, outside, problems),
    )
    return definition, problems


def _plain_function(function: object) -> FunctionType:
    """Return the function if it can be a program, otherwise raise ParameterError or PMLError."""
    if not isinstance(function, FunctionType):
        what = getattr(function, "__name__", None) or type(function).__name__
        raise ParameterError(
            f"@program stands over a function, not over {what}; write it directly over def", code="pml.not_a_function"
        )
    if objection := _objection(function):
        code = function.__code__
        raise PMLError(
            [Problem(Place(shown_path(code.co_filename), code.co_firstlineno), objection, code="pml.not_a_function")]
        )
    return function


def _objection(function: FunctionType) -> str | None:
    name = function.__name__
    if name == "<lambda>":
        return "a lambda is no program; write def with yield"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return f"{name} is async; write a plain def, and have the texts ready before it is called"
    if hasattr(function, "__wrapped__"):
        return f"another decorator stands between @program and {name}; write @program directly over def"
    around = function.__qualname__.removesuffix(name)
    if around and not around.endswith("<locals>."):
        return f"{name} stands in a class; write it outside, as a plain function"
    return None


@dataclass(frozen=True, slots=True)
class Built:
    """A schema's numbered children, and its modules as calls use them."""

    children: tuple[Text | Module | Union | Turn, ...]
    parts: tuple[ModuleCall, ...]


def build(pieces: Iterable[Piece], problems: Problems) -> Built:
    """Build the schema of a program, and report limits that it exceeds to ``problems``."""
    top = _Level(_Shared(Names(), problems, set()), "", 1)
    for piece in pieces:
        top.add(piece)
    children = tuple(node for node in top.nodes if not isinstance(node, Param))  # the top level has no parameters
    return Built(numbered(children), tuple(top.parts))


@dataclass(frozen=True, slots=True)
class _Shared:
    """Data that all levels of a schema share."""

    names: Names
    problems: Problems
    refused: set[str]

    def refuse(self, place: Place, message: str) -> None:
        """Report an exceeded limit once."""
        if message not in self.refused:
            self.problems.add(place, message, code="pml.too_large")
        self.refused.add(message)


class _Level:
    """One level of a schema: its top, a chat turn, or the inside of a module.

    Args:
        shared: Data of the whole schema.
        prefix: The prefix of its modules' names, from the calls around them.
        depth: The number of tags around it.
    """

    def __init__(self, shared: _Shared, prefix: str, depth: int) -> None:
        self.nodes: list[_Node] = []
        self.parts: list[ModuleCall] = []
        self.holes: dict[str, TextArgument] = {}
        self._shared = shared
        self._names = Names()  # of parameters
        self._prefix = prefix
        self._depth = depth

    def add(self, piece: Piece) -> None:
        """Append a piece unless it is empty."""
        if isinstance(piece, Said):
            for part in piece.parts:
                self._say(part, piece.place)
        elif isinstance(piece, Spoken):
            self._turn(piece)
        elif says_anything(piece):
            sections = [piece] if isinstance(piece, SectionPlan) else list(filter(says_anything, piece.sections))
            deeper = self._depth + (len(sections) > 1)
            modules = tuple(self._module(section, deeper) for section in sections)
            self.nodes.append(modules[0] if len(modules) == 1 else Union(modules, piece.place))

    def _say(self, part: str | TextArgument, place: Place) -> None:
        last = self.nodes[-1] if self.nodes else None
        if isinstance(part, TextArgument):
            name = self._names.unique(argument_label([part.name]))
            self.holes[name] = part
            self.nodes.append(Param(name, part.length, part.default, place))
        elif isinstance(last, Text):
            # one run, as in PML, so it is tokenized as one
            self.nodes[-1] = Text(last.text + part, last.place)
        else:
            self.nodes.append(Text(part, place))

    def _module(self, section: SectionPlan, depth: int) -> Module:
        name = self._shared.names.unique(path_label(self._prefix, section.label))
        self._check_size(section.place, depth + 1)
        inside = _Level(self._shared, f"{name}." if section.is_call else self._prefix, depth + 1)
        for piece in section.body:
            inside.add(piece)
        self.parts.append(ModuleCall(name, section.cases, tuple(inside.holes.items()), tuple(inside.parts)))
        # modules of programs hold no turns
        children = tuple(node for node in inside.nodes if not isinstance(node, Turn))
        return Module(name, children, section.place)

    def _turn(self, spoken: Spoken) -> None:
        inside = _Level(self._shared, self._prefix, self._depth + 1)
        for piece in spoken.body:
            inside.add(piece)
        self.parts += inside.parts
        # these turns hold neither
        children = tuple(node for node in inside.nodes if not isinstance(node, Param | Turn))
        self.nodes.append(Turn(spoken.role, children, spoken.place))

    def _check_size(self, place: Place, depth: int) -> None:
        # a parameter in the module adds one level
        if depth >= MAX_DEPTH:
            message = (
                f"the program nests more than {MAX_DEPTH} deep; write if … elif … in place of returns, or fewer calls"
            )
            self._shared.refuse(place, message)
        if len(self._shared.names) == MAX_ELEMENTS:
            self._shared.refuse(place, f"the program becomes more than {MAX_ELEMENTS:,} modules; split it")
