"""Questions that a call of a program answers, and the cases in which a piece of the program is part of the text.

All that a program can branch on has finitely many answers: which value a choice has, whether a set holds an element,
whether a text is not empty. So what a piece hangs on is written down as cases of answers, once, when the program is
translated, and a call only looks up which case it is.

Modules and parameters are named after the arguments and values of their cases. The names hang on nothing but the
program's text, so that they are the same in every process and on every machine.
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
"""How many combinations of answers one statement may hang on."""

_CHARACTERS = 60  # of one label
_TOTAL = 200  # of a name, with the calls around it; a number may follow
_CASES = 8  # that a name tells one by one


@dataclass(frozen=True, slots=True)
class Question:
    """One thing that every call settles, about an argument or about the ``element``-th value of a set.

    answers: the Python values that stand for the answers.
    prefix, labels: what names of modules are made of, for each answer.
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


Case = Mapping[Question, frozenset[int]]
"""By question, the numbers of the answers with which the case holds. A question that is missing does not matter."""

Cases = tuple[Case, ...]
"""Cases that exclude each other; whoever has them holds in each."""

ALWAYS: Cases = ({},)
NEVER: Cases = ()


class Undecided(PortableError):  # noqa: N818  # no error: a question to the caller
    """What was asked for hangs on a question that has several answers here."""

    def __init__(self, question: Question) -> None:
        self.question = question


class TooManyCasesError(Exception):
    """A statement hangs on too many combinations of answers."""


def possible(known: Case, question: Question) -> frozenset[int]:
    """The answers that are left where ``known`` holds."""
    return known.get(question, question.all)


def leaves(compute: Callable[[Case], _T], known: Case) -> list[tuple[Case, _T]]:
    """What ``compute`` gives for all answers that are possible where ``known`` holds: exclusive cases, in order.

    ``compute`` gets what is known and raises Undecided for a question that it needs to have answered.
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
    """The leaves with one entry for all that are alike, in order of their first one."""
    groups: dict[Hashable, tuple[_T, list[Case]]] = {}
    for case, value in found:
        groups.setdefault(key(value), (value, []))[1].append(case)
    return [(value, merged(cases, known)) for value, cases in groups.values()]


def merged(cases: Sequence[Case], known: Case) -> Cases:
    """Fewer cases that hold as often as these, where ``known`` holds: those that differ in one question are one."""
    boxes = list(cases)
    questions = list(dict.fromkeys(question for case in cases for question in case))
    before = len(boxes) + 1
    while len(boxes) < before:
        before = len(boxes)
        for question in questions:
            boxes = _merged_by(question, boxes, known)
    return tuple(boxes)


def _merged_by(question: Question, boxes: list[Case], known: Case) -> list[Case]:
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
    """The cases in which one of each holds."""
    met = (_met(case, other) for case in cases for other in others)
    return tuple(case for case in met if case is not None)


def _met(case: Case, other: Case) -> Case | None:
    answers = {question: case.get(question, picked) & picked for question, picked in other.items()}
    return {**case, **answers} if all(answers.values()) else None


def holds(cases: Cases, answers: Mapping[Question, int]) -> bool:
    """Whether one of the cases is that of a call."""
    return any(all(answers[question] in picked for question, picked in case.items()) for case in cases)


def narrowed(known: Case, cases: Cases) -> Case:
    """What is known where one of the cases holds, question by question."""
    found = dict(known)
    for question in cases[0]:
        if all(question in case for case in cases):
            found[question] = possible(known, question) & frozenset[int]().union(*(case[question] for case in cases))
    return found


def joined(knowns: Sequence[Case]) -> Case:
    """What is known where one of several paths was taken."""
    return {
        question: frozenset[int]().union(*(possible(known, question) for known in knowns)) for question in knowns[0]
    }


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
