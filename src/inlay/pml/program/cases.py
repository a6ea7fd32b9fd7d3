"""Questions that a call of a program answers, and the cases in which a piece of the program is part of the text.

A program branches only on questions with finitely many answers: the value of a choice, an element in a set, an empty or
non-empty text. The translation writes the conditions of each piece as cases of answers, once. A call only looks up its
case.

Modules and parameters are named after the arguments and values of their cases. The names depend only on the program's
text, so every process and machine makes the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, TypeVar

from inlay.errors import PortableError
from inlay.pml.attributes import TAGS, is_name

_T = TypeVar("_T")

MAX_CASES = 4_096
"""The most combinations of answers that one statement may depend on."""

_CHARACTERS = 60  # of one label
_TOTAL = 200  # of a name with the prefix of its calls; a number may follow
_CASES = 8  # spelled out one by one in a name


@dataclass(frozen=True, slots=True)
class CaseQuestion:
    """A question that every call answers, about an argument or about one element of a set.

    Attributes:
        element: The index of the element in the set's values, or None for a question about the whole argument.
        answers: The Python value of each answer.
        prefix: The start of a module's name.
        labels: The part of a module's name for each answer.
    """

    argument: str
    element: int | None
    answers: tuple[Any, ...] = field(compare=False)
    prefix: str = field(compare=False)
    labels: tuple[str, ...] = field(compare=False)

    @property
    def all(self) -> frozenset[int]:
        """The numbers of all answers."""
        return frozenset(range(len(self.answers)))


Case = Mapping[CaseQuestion, frozenset[int]]
"""By question, the numbers of the answers with which the case holds. A missing question does not matter."""

Cases = tuple[Case, ...]
"""Cases that exclude each other. They hold together as a disjunction."""

ALWAYS: Cases = ({},)
NEVER: Cases = ()


class Undecided(PortableError):  # noqa: N818  # no error: a question to the caller
    """The result depends on a question that has several answers here."""

    def __init__(self, question: CaseQuestion) -> None:
        self.question = question


class TooManyCasesError(Exception):
    """A statement depends on too many combinations of answers."""


def possible(known: Case, question: CaseQuestion) -> frozenset[int]:
    """Return the answers that remain possible under ``known``."""
    return known.get(question, question.all)


def leaves(compute: Callable[[Case], _T], known: Case) -> list[tuple[Case, _T]]:
    """Run ``compute`` for all answers that are possible under ``known``.

    Args:
        compute: Takes the known answers. It raises Undecided for a question that it needs answered.

    Returns:
        Exclusive cases, in order, each with its result.

    Raises:
        TooManyCasesError: There are more than MAX_CASES.
    """
    found: list[tuple[Case, _T]] = []
    waiting: list[Case] = [{}]
    while waiting:
        case = waiting.pop()
        try:
            found.append((case, compute({**known, **case})))
        except Undecided as need:
            answers = sorted(possible(known, need.question), reverse=True)
            waiting += [{**case, need.question: frozenset((answer,))} for answer in answers]
        if len(found) + len(waiting) > MAX_CASES:
            raise TooManyCasesError
    return found


def grouped(
    found: Iterable[tuple[Case, _T]], known: Case, key: Callable[[_T], Hashable] = lambda value: value
) -> list[tuple[_T, Cases]]:
    """Group leaves with equal keys, in the order of the first leaf of each group."""
    groups: dict[Hashable, tuple[_T, list[Case]]] = {}
    for case, value in found:
        groups.setdefault(key(value), (value, []))[1].append(case)
    return [(value, merged(cases, known)) for value, cases in groups.values()]


def merged(cases: Sequence[Case], known: Case) -> Cases:
    """Merge cases that differ in one question. The result holds exactly when ``cases`` do, as long as ``known``
    holds.
    """
    boxes = list(cases)
    questions = list(dict.fromkeys(question for case in cases for question in case))
    before = len(boxes) + 1
    while len(boxes) < before:
        before = len(boxes)
        for question in questions:
            boxes = _merged_by(question, boxes, known)
    return tuple(boxes)


def _merged_by(question: CaseQuestion, boxes: list[Case], known: Case) -> list[Case]:
    answers: dict[Hashable, frozenset[int]] = {}
    rests: dict[Hashable, Case] = {}
    for box in boxes:
        rest = {other: picked for other, picked in box.items() if other != question}
        key = (frozenset(rest.items()), question in box)
        answers[key] = answers.get(key, frozenset()) | box.get(question, question.all)
        rests[key] = rest
    settled = (question.all, possible(known, question))
    return [rest if answers[key] in settled else {**rest, question: answers[key]} for key, rest in rests.items()]


def both(cases: Cases, others: Cases) -> Cases:
    """Return the cases in which both hold."""
    met = (_met(case, other) for case in cases for other in others)
    return tuple(case for case in met if case is not None)


def _met(case: Case, other: Case) -> Case | None:
    answers = {question: case.get(question, picked) & picked for question, picked in other.items()}
    return {**case, **answers} if all(answers.values()) else None


def holds(cases: Cases, answers: Mapping[CaseQuestion, int]) -> bool:
    """Return True if one of the cases matches the answers of a call."""
    return any(all(answers[question] in picked for question, picked in case.items()) for case in cases)


def narrowed(known: Case, cases: Cases) -> Case:
    """Return the known answers after adding that one of the cases holds, question by question."""
    found = dict(known)
    for question in cases[0]:
        if all(question in case for case in cases):
            found[question] = possible(known, question) & frozenset[int]().union(*(case[question] for case in cases))
    return found


def joined(knowns: Sequence[Case]) -> Case:
    """Return the answers that are known after one of several paths was taken."""
    return {
        question: frozenset[int]().union(*(possible(known, question) for known in knowns)) for question in knowns[0]
    }


def word(value: object) -> str:
    """Turn a value into a part of a name: ``New York`` becomes ``New-York``. Empty if no character may be in a name."""
    text = value.name if isinstance(value, Enum) else str(value)
    characters = (character if is_name(f"_{character}") else " " for character in text)
    return "-".join("".join(characters).split())


def value_words(values: Sequence[object]) -> tuple[str, ...]:
    """Return a part of a name for each of these values. A value without a usable character gets its number."""
    return tuple(word(value) or f"value-{number}" for number, value in enumerate(values, 1))


def argument_label(arguments: Sequence[str]) -> str:
    """Return the label of a module that exists for these arguments."""
    return _clipped("-and-".join(dict.fromkeys(map(word, arguments))))


def case_label(cases: Sequence[Case]) -> str:
    """Return the label of a module that is imported in these cases."""
    if len(cases) > _CASES:
        return argument_label([question.argument for case in cases for question in case])
    return _clipped("-or-".join(_case_label(case) for case in cases))


def short_cases(cases: Cases, earlier: Sequence[Case], known: Case) -> list[Case]:
    """Drop answers that other cases make superfluous: "a, or not a and b" becomes "a or b".

    Args:
        cases: The cases to shorten.
        earlier: Short cases of earlier branches, such as ``if`` before ``elif``. They are not excluded again.
        known: The answers that are known.
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
    """Gives unique names that PML does not reserve."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by name in use, the next number to try for a similar name

    def __len__(self) -> int:
        return len(self._numbers)

    def unique(self, label: str) -> str:
        """Turn the label into a new unique name."""
        name = label if is_name(label) else f"_{label}"
        name = f"{name}_" if name in TAGS else name
        if name in self._numbers:
            number = next(n for n in count(self._numbers[name]) if f"{name}-{n}" not in self._numbers)
            self._numbers[name] = number + 1
            name = f"{name}-{number}"
        self._numbers[name] = 2
        return name


def path_label(prefix: str, label: str) -> str:
    """Prefix a label with the names of the calls around it."""
    return f"{prefix}{label}"[:_TOTAL]


def _case_label(case: Case) -> str:
    return "-and-".join(_answer_label(question, picked) for question, picked in case.items())


def _answer_label(question: CaseQuestion, picked: frozenset[int]) -> str:
    """Return ``place.miami-or-tokyo``, or ``place.not-miami`` if that is shorter."""
    others = question.all - picked
    few, negation = (picked, "") if len(picked) <= max(len(others), 1) else (others, "not-")
    return f"{question.prefix}{negation}{'-or-'.join(question.labels[answer] for answer in sorted(few))}"


def _inside(case: Case, other: Case) -> bool:
    return all(question in case and case[question] <= picked for question, picked in other.items())


def _clipped(label: str) -> str:
    return label if len(label) <= _CHARACTERS else label[:_CHARACTERS].rstrip("-.")
