"""A decorated program: its schema, the prompts of its calls, and the function as plain Python.

The chat turns of a program, such as ``with inlay.user():``, record the role while the function runs.
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
from inlay.pml.nodes import Argument, Import
from inlay.pml.program.cases import CaseQuestion, Cases, holds
from inlay.pml.program.inputs import Definition, TextArgument
from inlay.pml.schema import Prompt, PromptBuilder, Schema
from inlay.wording import shown_python

P = ParamSpec("P")
Messages = list[dict[str, str]]

_heard: ContextVar[Messages | None] = ContextVar("inlay_turns", default=None)


def system() -> AbstractContextManager[None]:
    """Open a system turn of a program. It must be at the top level of the program."""
    return _turn("system")


def user() -> AbstractContextManager[None]:
    """Open a user turn of a program. It must be at the top level of the program."""
    return _turn("user")


def assistant() -> AbstractContextManager[None]:
    """Open an assistant turn of a program. It must be at the top level of the program."""
    return _turn("assistant")


TURNS = {system: "system", user: "user", assistant: "assistant"}


def as_messages(pieces: Iterable[str]) -> Messages:
    """Return the text of a running program, turn by turn. All of its text must be inside turns."""
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


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module of the schema, as a call uses it.

    Attributes:
        cases: The cases in which it is imported, provided that the module around it is.
        holes: The names of its parameters, each with the argument that fills it.
    """

    name: str
    cases: Cases
    holes: tuple[tuple[str, TextArgument], ...]
    parts: tuple[ModuleCall, ...]


def imports(
    parts: Iterable[ModuleCall], answers: Mapping[CaseQuestion, int], texts: Mapping[str, str], place: Place
) -> tuple[Import, ...]:
    """Return the imports of a call.

    Args:
        answers: The call's answer to each question.
        texts: The call's arguments by name. A text that equals its default is left to the schema, which caches the
            default.
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


class Program(Generic[P]):
    """A Python function that is a schema; a call of it is a prompt.

    Attributes:
        schema: The schema of all prompts of the program, built by the decorator.
        function: The function itself, which yields the same text as plain Python.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[P, Iterable[str]],
        definition: Definition,
        schema: Schema,
        parts: tuple[ModuleCall, ...],
    ) -> None:
        update_wrapper(self, function)
        self.function = function
        self.definition = definition
        self.schema = schema
        self._parts = parts

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramPrompt:
        """Return the prompt for these arguments. Raises ParameterError for invalid arguments."""
        bound = self._bound(args, kwargs)
        answers: dict[CaseQuestion, int] = {}
        for name, one in self.definition.inputs.items():
            answers.update(one.answers(bound.arguments[name]))
        place = self.schema.prompt().place
        children = imports(self._parts, answers, bound.arguments, place)
        return ProgramPrompt(self.schema.name, children, place.source, place, program=self, arguments=bound)

    def text(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Run the function as plain Python and return its text, with chat turns joined."""
        return "".join(self(*args, **kwargs))

    def messages(self, /, *args: P.args, **kwargs: P.kwargs) -> Messages:
        """Run the function as plain Python and return one chat message for each turn, with "role" and "content".

        Raises ParameterError for a program without chat turns.
        """
        prompt = self(*args, **kwargs)
        if not self.schema.has_turns:
            raise ParameterError(
                f"program {self.__name__} has no chat turns; call text(…), or write with inlay.user():",
                code="prompt.no_turns",
            )
        return as_messages(prompt)

    def __repr__(self) -> str:
        return f"<program {self.definition.usage}>"

    def __reduce__(self) -> str:
        # pickled by name, like a function
        return self.__qualname__

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            bound = self.definition.signature.bind(*args, **kwargs)
        except TypeError as error:
            usage = self.definition.usage
            raise ParameterError(
                f"program {self.__name__}: {error}; call it as {usage}", code="parameter.wrong_arguments"
            ) from None
        bound.apply_defaults()
        for name, one in self.definition.inputs.items():
            value = bound.arguments[name]
            if objection := one.objection(value):
                raise ParameterError(
                    f"program {self.__name__}: '{name}' is {shown_python(value)}; {objection}",
                    code="parameter.wrong_type",
                )
        return bound


@dataclass(frozen=True)
class ProgramPrompt(Prompt):
    """The prompt of a call. Iterating over it runs the function as plain Python and yields the same text."""

    program: Program[...] = field(kw_only=True, compare=False, repr=False)
    arguments: inspect.BoundArguments = field(kw_only=True, compare=False, repr=False)

    def __iter__(self) -> Iterator[str]:
        yield from self.program.function(*self.arguments.args, **self.arguments.kwargs)

    def builder(self) -> PromptBuilder:
        """Return a builder that starts with this prompt, to append text and turns."""
        return PromptBuilder(self.schema, self.program.schema.prompt().place, self.children)
