"""The arguments of a program, read from annotations: choices, sets of choices, and text of limited length."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections import abc
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, Flag
from functools import cached_property
from types import FunctionType
from typing import Any

from inlay.errors import ParameterError
from inlay.pml.nodes import MAX_PARAM_LENGTH
from inlay.pml.problems import Problems
from inlay.pml.program.cases import CaseQuestion, value_words, word
from inlay.pml.program.source import Outside, ProgramSource
from inlay.wording import lone_surrogate, shown_python

_LISTED = 8  # values shown in a message
_SETS = (frozenset, set, abc.Set, abc.Collection)
_CHOICES = "bool, Literal[…] or an Enum"
_TYPES = f"{_CHOICES}, frozenset[Literal[…]], or Annotated[str, Length(…)]"


@dataclass(frozen=True, slots=True)
class Length:
    """The most tokens that an argument of type ``str`` may have: ``Annotated[str, Length(5)]``.

    ``tokens`` is from 1 to 1,000,000. Raises ParameterError for any other value.
    """

    tokens: int

    def __post_init__(self) -> None:
        whole = isinstance(self.tokens, int) and not isinstance(self.tokens, bool)
        if not whole or not 1 <= self.tokens <= MAX_PARAM_LENGTH:
            limits = f"it takes a whole number of tokens from 1 to {MAX_PARAM_LENGTH}"
            raise ParameterError(f"Length({self.tokens!r}): {limits}", code="parameter.out_of_range")


@dataclass(frozen=True)
class ChoiceArgument:
    """An argument with one of a few values: a bool, a Literal or an Enum."""

    name: str
    values: tuple[Any, ...]

    @cached_property
    def question(self) -> CaseQuestion:
        """The question which value the argument has."""
        if self.is_flag:
            return _yes_or_no(self.name)
        return CaseQuestion(self.name, None, self.values, f"{word(self.name)}.", value_words(self.values))

    @property
    def is_flag(self) -> bool:
        """True if the values are True and False only."""
        return self.values == (True, False) and all(isinstance(value, bool) for value in self.values)

    @property
    def allowed(self) -> str:
        return listed_values(self.values)

    def objection(self, value: object) -> str | None:
        """Return the reason why the argument cannot have this value, or None if it can."""
        return None if position(self.values, value) is not None else f"it must be {self.allowed}"

    def answers(self, value: object) -> Mapping[CaseQuestion, int]:
        """Return the answers of a call with this value."""
        number = position(self.values, value)
        return {} if number is None else {self.question: number}


@dataclass(frozen=True)
class SetArgument:
    """An argument that is a set of some of a few values."""

    name: str
    values: tuple[Any, ...]

    @cached_property
    def questions(self) -> tuple[CaseQuestion, ...]:
        """For each value, the question whether the set contains it."""
        labels = value_words(self.values)
        prefix = f"{word(self.name)}."
        return tuple(
            CaseQuestion(self.name, number, (True, False), prefix, (label, f"not-{label}"))
            for number, label in enumerate(labels)
        )

    @cached_property
    def any(self) -> CaseQuestion:
        """The question whether the set contains any value."""
        return _yes_or_no(self.name)

    @property
    def allowed(self) -> str:
        return f"a set of {listed_values(self.values, 'and')}"

    def objection(self, value: object) -> str | None:
        """Return the reason why the argument cannot have this value, or None if it can."""
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            return f"it must be {self.allowed}"
        wrong = [element for element in value if position(self.values, element) is None]
        return f"it must be {self.allowed}, without {shown_python(wrong[0])}" if wrong else None

    def answers(self, value: Collection[object]) -> Mapping[CaseQuestion, int]:
        """Return the answers of a call with this value."""
        held = {position(self.values, element) for element in value}
        elements = {question: 0 if question.element in held else 1 for question in self.questions}
        return {self.any: 0 if held else 1, **elements}


@dataclass(frozen=True)
class TextArgument:
    """An argument that is text of at most ``length`` tokens, counted by the engine. ``default`` is cached."""

    name: str
    length: int
    default: str | None

    @cached_property
    def question(self) -> CaseQuestion:
        """The question whether the text is not empty, the only one that a program can ask about it."""
        return _yes_or_no(self.name)

    @property
    def allowed(self) -> str:
        return f"a str of at most {self.length} tokens"

    def objection(self, value: object) -> str | None:
        """Return the reason why the argument cannot have this value, or None if it can."""
        if type(value) is not str:
            return f"it must be {self.allowed}"
        found = lone_surrogate(value)
        return f"it holds {found}" if found else None

    def answers(self, value: str) -> Mapping[CaseQuestion, int]:
        """Return the answers of a call with this value."""
        return {self.question: 0 if value else 1}


Input = ChoiceArgument | SetArgument | TextArgument


@dataclass(frozen=True, slots=True)
class Selected:
    """The value of a Selection while the program is translated."""

    selection: SetArgument


@dataclass(frozen=True, slots=True)
class Template:
    """Text with holes, while the program is translated."""

    parts: tuple[str | TextArgument, ...]


def _yes_or_no(name: str) -> CaseQuestion:
    return CaseQuestion(name, None, (True, False), "", (word(name), f"not-{word(name)}"))


def position(values: tuple[Any, ...], value: object) -> int | None:
    """Return the index of a value by type and equality, so 1 is not True. None if it is not among the values."""
    alike = (number for number, one in enumerate(values) if type(one) is type(value) and one == value)
    return next(alike, None)


def listed_values(values: Collection[object], last: str = "or") -> str:
    """Format values as ``'miami' or 'tokyo'``, and only the first ones if there are many."""
    first = [shown_python(value) for value in list(values)[:_LISTED]]
    if len(values) > _LISTED:
        return f"{', '.join(first)}, …"
    return f" {last} ".join([part for part in (", ".join(first[:-1]), first[-1]) if part])


class _Unfit(Exception):  # noqa: N818  # carries a message to the argument that it is about
    """An annotation that does not define an input."""


def read_inputs(
    function: FunctionType, node: ast.FunctionDef, source: ProgramSource, outside: Outside, problems: Problems
) -> dict[str, Input]:
    """Return the inputs of a program by name, and report errors of its arguments to ``problems``."""
    places = {argument.arg: argument for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    inputs: dict[str, Input] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        try:
            inputs[name] = _input(function, parameter, outside)
        except _Unfit as unfit:
            problems.add(source.place(places[name]), f"argument '{name}' {unfit}", code="pml.invalid_program_argument")
    return inputs


def _input(function: FunctionType, parameter: inspect.Parameter, outside: Outside) -> Input:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        raise _Unfit(f"stands for any number of arguments ({star}); write each argument with its type")
    if parameter.annotation is parameter.empty:
        raise _Unfit(f"has no type; annotate it with {_TYPES}")
    default = parameter.default
    found = _of_type(parameter.name, _evaluated(function, parameter, outside), default)
    if default is parameter.empty:
        return found
    if isinstance(default, list | dict | set):
        raise _Unfit("has a default that can change; write frozenset(…) or a tuple")
    if objection := found.objection(default):
        raise _Unfit(f"has the default {default!r}; {objection}")
    return found


def _evaluated(function: FunctionType, parameter: inspect.Parameter, outside: Outside) -> Any:
    """Evaluate the annotation, even if it is a string."""
    holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        hints = typing.get_type_hints(holder, function.__globals__, outside.closed(), include_extras=True)
    except Exception as error:  # an annotation is any expression, so any exception is possible
        reason = " ".join(str(error).split()) or type(error).__name__
        late = "define or import what it names above the program, and not under TYPE_CHECKING alone"
        remedy = late if isinstance(error, NameError) else "correct it"
        raise _Unfit(f"has a type that cannot be evaluated ({reason}); {remedy}") from None
    return hints["it"]


def _of_type(name: str, hint: Any, default: Any) -> Input:
    hint = _unaliased(hint)
    if hint is str:
        raise _Unfit("is a str of any length; write Annotated[str, Length(…)] with the most tokens it may have")
    if typing.get_origin(hint) is typing.Annotated:
        inner, *extras = typing.get_args(hint)
        lengths = [extra for extra in extras if isinstance(extra, Length) or extra is Length]
        if _unaliased(inner) is str:
            return _words(name, lengths, default)
        if lengths:
            raise _Unfit("has a Length, which is for str alone; leave it out")
        return _of_type(name, inner, default)
    if typing.get_origin(hint) in _SETS:
        (element,) = typing.get_args(hint)
        return SetArgument(name, _distinct(_values(element)))
    if hint in _SETS:
        raise _Unfit(f"is a set of anything; write {getattr(hint, '__name__', 'frozenset')}[Literal[…]]")
    return ChoiceArgument(name, _distinct(_values(hint)))


def _words(name: str, lengths: list[Any], default: Any) -> TextArgument:
    if len(lengths) != 1 or lengths[0] is Length:
        raise _Unfit("is a str of any length; write Annotated[str, Length(…)] with one number of tokens")
    return TextArgument(name, lengths[0].tokens, default if isinstance(default, str) else None)


def _values(hint: Any) -> Iterable[Any]:
    """Return all values of a type that has few."""
    hint = _unaliased(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _values(typing.get_args(hint)[0])
    if origin is typing.Literal:
        return typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [value for member in typing.get_args(hint) for value in _values(member)]
    if hint is bool:
        return (True, False)
    if hint in (None, type(None)):
        return (None,)
    if isinstance(hint, type) and issubclass(hint, Enum) and not issubclass(hint, Flag) and len(hint):
        return list(hint)
    raise _Unfit(f"has the type {_type_name(hint)}, which has too many values; write {_TYPES}")


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = ()
    for value in values:
        found += (value,) if position(found, value) is None else ()
    return found


def _unaliased(hint: Any) -> Any:
    while type(hint).__name__ == "TypeAliasType":  # ``type Place = Literal[…]``, from Python 3.12 on
        hint = hint.__value__
    return hint


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


@dataclass(frozen=True, slots=True)
class Definition:
    """A program as its author wrote it.

    Attributes:
        name: The name of the function, also used for the modules of its calls.
        home: The module and the qualified name of the function, to detect a program that calls itself.
        local_names: The local names of the function, including its arguments.
        inputs: The inputs, by argument.
    """

    name: str
    home: tuple[str, str]
    source: ProgramSource
    node: ast.FunctionDef
    outside: Outside
    local_names: frozenset[str]
    signature: inspect.Signature
    inputs: Mapping[str, Input]

    @property
    def body(self) -> list[ast.stmt]:
        """The statements, without the docstring."""
        return self.node.body[1:] if ast.get_docstring(self.node, clean=False) is not None else self.node.body

    @property
    def usage(self) -> str:
        """The call with its arguments, for messages."""
        shown = [
            parameter.replace(
                annotation=_Shown(self.inputs[name].allowed),
                default=parameter.default
                if parameter.default is parameter.empty
                else _Shown(_written(parameter.default)),
            )
            for name, parameter in self.signature.parameters.items()
        ]
        return f"{self.name}{inspect.Signature(shown)}"


@dataclass(frozen=True, slots=True)
class _Shown:
    """Has a repr without quotation marks."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _written(value: object) -> str:
    if isinstance(value, frozenset):
        # the order of a set is not fixed
        return f"{{{', '.join(sorted(map(repr, value)))}}}" if value else "frozenset()"
    return repr(value)
