"""What a program can take: choices, sets of choices, and text of a limited length."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from inlay.errors import ParameterError
from inlay.pml.limits import MAX_PARAM_LENGTH
from inlay.pml.problems import clip, lone_surrogate
from inlay.pml.program.cases import Question
from inlay.pml.program.names import value_words, word

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens an argument of type ``str`` may have at most: ``Annotated[str, Length(5)]``.

    tokens: from 1 to 1,000,000. Raises ParameterError for any other number.
    """

    tokens: int

    def __post_init__(self) -> None:
        whole = isinstance(self.tokens, int) and not isinstance(self.tokens, bool)
        if not whole or not 1 <= self.tokens <= MAX_PARAM_LENGTH:
            limits = f"it takes a whole number of tokens from 1 to {MAX_PARAM_LENGTH}"
            raise ParameterError(f"Length({self.tokens!r}): {limits}")


@dataclass(frozen=True)
class Choice:
    """An argument that has one of a few values: a bool, a Literal, an Enum."""

    name: str
    values: tuple[Any, ...]

    @cached_property
    def question(self) -> Question:
        """Which value it is."""
        if self.is_flag:
            return _yes_or_no(self.name)
        return Question(self.name, None, self.values, f"{word(self.name)}.", value_words(self.values))

    @property
    def is_flag(self) -> bool:
        """Whether it is True or False and nothing else."""
        return self.values == (True, False) and all(isinstance(value, bool) for value in self.values)

    @property
    def allowed(self) -> str:
        return listed_values(self.values)

    def objection(self, value: object) -> str | None:
        """Why this is no value for the argument, or None if it is one."""
        return None if position(self.values, value) is not None else f"it must be {self.allowed}"

    def answers(self, value: object) -> Mapping[Question, int]:
        """What a call says with this value."""
        number = position(self.values, value)
        return {} if number is None else {self.question: number}


@dataclass(frozen=True)
class Selection:
    """An argument that is a set of some of a few values."""

    name: str
    values: tuple[Any, ...]

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """For each value, whether the set holds it."""
        labels = value_words(self.values)
        prefix = f"{word(self.name)}."
        return tuple(
            Question(self.name, number, (True, False), prefix, (label, f"not-{label}"))
            for number, label in enumerate(labels)
        )

    @cached_property
    def any(self) -> Question:
        """Whether the set holds anything."""
        return _yes_or_no(self.name)

    @property
    def allowed(self) -> str:
        return f"a set of {listed_values(self.values, 'and')}"

    def objection(self, value: object) -> str | None:
        """Why this is no value for the argument, or None if it is one."""
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            return f"it must be {self.allowed}"
        wrong = [element for element in value if position(self.values, element) is None]
        return f"it must be {self.allowed}, without {shown(wrong[0])}" if wrong else None

    def answers(self, value: Collection[object]) -> Mapping[Question, int]:
        """What a call says with this value."""
        held = {position(self.values, element) for element in value}
        elements = {question: 0 if question.element in held else 1 for question in self.questions}
        return {self.any: 0 if held else 1, **elements}


@dataclass(frozen=True)
class Words:
    """An argument that is text of at most ``length`` tokens, which the engine counts. ``default`` is cached."""

    name: str
    length: int
    default: str | None

    @cached_property
    def question(self) -> Question:
        """Whether the text is not empty: all that a program can ask about it."""
        return _yes_or_no(self.name)

    @property
    def allowed(self) -> str:
        return f"a str of at most {self.length} tokens"

    def objection(self, value: object) -> str | None:
        """Why this is no value for the argument, or None if it is one."""
        if type(value) is not str:
            return f"it must be {self.allowed}"
        found = lone_surrogate(value)
        return f"it holds {found}" if found else None

    def answers(self, value: str) -> Mapping[Question, int]:
        """What a call says with this value."""
        return {self.question: 0 if value else 1}


Input = Choice | Selection | Words


@dataclass(frozen=True, slots=True)
class Selected:
    """The value of a Selection while the program is translated."""

    selection: Selection


@dataclass(frozen=True, slots=True)
class Template:
    """Text with holes, while the program is translated."""

    parts: tuple[str | Words, ...]


def _yes_or_no(name: str) -> Question:
    return Question(name, None, (True, False), "", (word(name), f"not-{word(name)}"))


def position(values: tuple[Any, ...], value: object) -> int | None:
    """Which one of the values this is, by type and equality: 1 is not True. None if it is none of them."""
    alike = (number for number, one in enumerate(values) if type(one) is type(value) and one == value)
    return next(alike, None)


def shown(value: object) -> str:
    """A value as a message quotes it."""
    return clip(str(value) if isinstance(value, Enum) else repr(value))


def listed_values(values: Collection[object], last: str = "or") -> str:
    """``'miami' or 'tokyo'``; the first few, where there are many."""
    first = [shown(value) for value in list(values)[:_LISTED]]
    if len(values) > _LISTED:
        return f"{', '.join(first)}, …"
    return f" {last} ".join([part for part in (", ".join(first[:-1]), first[-1]) if part])
