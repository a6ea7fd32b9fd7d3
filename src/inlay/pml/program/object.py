"""A program and what a call of it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Generic, ParamSpec

from inlay.errors import ParameterError
from inlay.pml.builder import PromptBuilder
from inlay.pml.program.build import Part, imports
from inlay.pml.program.cases import Question
from inlay.pml.program.definition import Definition
from inlay.pml.program.inputs import shown
from inlay.pml.program.turns import Messages, as_messages
from inlay.pml.prompt import Prompt
from inlay.pml.schema import Schema

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
