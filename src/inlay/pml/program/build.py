"""Chat turns in a program: ``with inlay.user():``. While the function runs as plain Python, they note who speaks.

A translated program → the nodes of its schema, and what a call imports of them.

A program and what a call of it gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Generic, ParamSpec

from inlay.errors import ParameterError, Place
from inlay.pml.nodes import MAX_DEPTH, MAX_ELEMENTS, Argument, Import, Module, Param, Text, Turn, Union, numbered
from inlay.pml.problems import Problems
from inlay.pml.program.inputs import Cases, Names, Question, Words, argument_label, holds, path_label, shown
from inlay.pml.program.paths import Piece, Said, Section, Spoken, says_anything
from inlay.pml.program.signature import Definition
from inlay.pml.schema import Prompt, PromptBuilder, Schema

Messages = list[dict[str, str]]

_heard: ContextVar[Messages | None] = ContextVar("inlay_turns", default=None)


def system() -> AbstractContextManager[None]:
    """A system turn of a program; stands at its top level."""
    return _turn("system")


def user() -> AbstractContextManager[None]:
    """A user turn of a program; stands at its top level."""
    return _turn("user")


def assistant() -> AbstractContextManager[None]:
    """An assistant turn of a program; stands at its top level."""
    return _turn("assistant")


TURNS = {system: "system", user: "user", assistant: "assistant"}


def as_messages(pieces: Iterable[str]) -> Messages:
    """What a running program says, turn by turn. All of its text stands inside turns."""
    messages: Messages = []
    token = _heard.set(messages)
    try:
        for piece in pieces:
            messages[-1]["content"] += piece
    finally:
        _heard.reset(token)
    return messages


@contextmanager
def _turn(role: str) -> Iterator[None]:
    messages = _heard.get()
    if messages is not None:
        messages.append({"role": role, "content": ""})
    yield


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


P = ParamSpec("P")


class Program(Generic[P]):
    """A Python function that is a schema; a call of it is a prompt.

    schema: what the function can say, built when it was decorated.
    function: the function itself, which says it as plain Python.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self, function: Callable[P, Iterable[str]], definition: Definition, schema: Schema, parts: tuple[Part, ...]
    ) -> None:
        update_wrapper(self, function)
        self.function = function
        self.definition = definition
        self.schema = schema
        self._parts = parts

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramPrompt:
        """The prompt for these arguments. Raises ParameterError for arguments that the program does not take."""
        bound = self._bound(args, kwargs)
        answers: dict[Question, int] = {}
        for name, one in self.definition.inputs.items():
            answers.update(one.answers(bound.arguments[name]))
        place = self.schema.prompt().place
        children = imports(self._parts, answers, bound.arguments, place)
        return ProgramPrompt(self.schema.name, children, place.source, place, program=self, arguments=bound)

    def text(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """What the function says as plain Python: the text of the prompt, chat turns one behind the other."""
        return "".join(self(*args, **kwargs))

    def messages(self, /, *args: P.args, **kwargs: P.kwargs) -> Messages:
        """What the function says as plain Python, as chat messages: one for each turn, with "role" and "content".

        Raises ParameterError for a program without chat turns.
        """
        prompt = self(*args, **kwargs)
        if not self.schema.has_turns:
            raise ParameterError(
                f"program {self.__name__} has no chat turns; call text(…), or write with inlay.user():"
            )
        return as_messages(prompt)

    def __repr__(self) -> str:
        return f"<program {self.definition.usage}>"

    def __reduce__(self) -> str:
        # found again under its name, like a function
        return self.__qualname__

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            bound = self.definition.signature.bind(*args, **kwargs)
        except TypeError as error:
            usage = self.definition.usage
            raise ParameterError(f"program {self.__name__}: {error}; call it as {usage}") from None
        bound.apply_defaults()
        for name, one in self.definition.inputs.items():
            value = bound.arguments[name]
            if objection := one.objection(value):
                raise ParameterError(f"program {self.__name__}: '{name}' is {shown(value)}; {objection}")
        return bound


@dataclass(frozen=True)
class ProgramPrompt(Prompt):
    """The prompt of a call. Iterating over it runs the function as plain Python, which gives the same text."""

    program: Program[...] = field(kw_only=True, compare=False, repr=False)
    arguments: inspect.BoundArguments = field(kw_only=True, compare=False, repr=False)

    def __iter__(self) -> Iterator[str]:
        yield from self.program.function(*self.arguments.args, **self.arguments.kwargs)

    def builder(self) -> PromptBuilder:
        """A builder that begins with this prompt, for text and turns behind it."""
        return PromptBuilder(self.schema, self.program.schema.prompt().place, self.children)
