"""Names of modules and parameters, made of the names and the values of a program's arguments.

They hang on nothing but the program's text, so that they are the same in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import count

from inlay.pml.names import TAGS, is_name
from inlay.pml.program.cases import Case, Cases, Question, possible

_CHARACTERS = 60  # of one label
_TOTAL = 200  # of a name, with the calls around it; a number may follow
_CASES = 8  # that a name tells one by one


def word(value: object) -> str:
    """A value as a part of a name: ``New York`` is ``New-York``; empty where no character can stand in a name."""
    text = value.name if isinstance(value, Enum) else str(value)
    characters = (character if is_name(f"_{character}") else " " for character in text)
    return "-".join("".join(characters).split())


def value_words(values: Sequence[object]) -> tuple[str, ...]:
    """A part of a name for each of these values, by their number where they have none of their own."""
    return tuple(word(value) or f"value-{number}" for number, value in enumerate(values, 1))


def argument_label(arguments: Sequence[str]) -> str:
    """What a module is called that is there for its arguments."""
    return _clipped("-and-".join(dict.fromkeys(map(word, arguments))))


def case_label(cases: Sequence[Case]) -> str:
    """What a module is called that is imported in these cases."""
    if len(cases) > _CASES:
        return argument_label([question.argument for case in cases for question in case])
    return _clipped("-or-".join(_case_label(case) for case in cases))


def short_cases(cases: Cases, earlier: Sequence[Case], known: Case) -> list[Case]:
    """The cases without the answers that others make superfluous: a, or not a and b, is a or b.

    earlier: cases that were asked about before, as by ``if`` before ``elif``, in short; they are not excluded again.
    """
    if len(cases) > _CASES:
        return list(cases)
    boxes = list(cases)
    for index, box in enumerate(boxes):
        for question in list(box):
            others = [*boxes[:index], *boxes[index + 1 :], *earlier]
            flipped = {**boxes[index], question: possible(known, question) - box[question]}
            if len(boxes[index]) > 1 and any(_inside(flipped, other) for other in others):
                boxes[index] = {other: picked for other, picked in boxes[index].items() if other != question}
    asked = list(dict.fromkeys(question for case in cases for question in case))
    return sorted(boxes, key=lambda box: [asked.index(question) for question in box])


class Names:
    """Gives names that are not taken yet, and that PML does not reserve."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by name that is taken, the number that the next one like it may get

    def __len__(self) -> int:
        return len(self._numbers)

    def unique(self, label: str) -> str:
        """The label as a name, which is taken from now on."""
        name = label if is_name(label) else f"_{label}"
        name = f"{name}_" if name in TAGS else name
        if name in self._numbers:
            number = next(n for n in count(self._numbers[name]) if f"{name}-{n}" not in self._numbers)
            self._numbers[name] = number + 1
            name = f"{name}-{number}"
        self._numbers[name] = 2
        return name


def path_label(prefix: str, label: str) -> str:
    """A label with the names of the calls around it in front."""
    return f"{prefix}{label}"[:_TOTAL]


def _case_label(case: Case) -> str:
    return "-and-".join(_answer_label(question, picked) for question, picked in case.items())


def _answer_label(question: Question, picked: frozenset[int]) -> str:
    """``place.miami-or-tokyo``, or ``place.not-miami`` where that is shorter."""
    others = question.all - picked
    few, negation = (picked, "") if len(picked) <= max(len(others), 1) else (others, "not-")
    return f"{question.prefix}{negation}{'-or-'.join(question.labels[answer] for answer in sorted(few))}"


def _inside(case: Case, other: Case) -> bool:
    return all(question in case and case[question] <= picked for question, picked in other.items())


def _clipped(label: str) -> str:
    return label if len(label) <= _CHARACTERS else label[:_CHARACTERS].rstrip("-.")
