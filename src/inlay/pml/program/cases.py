"""Questions that a call of a program answers, and the cases in which a piece of the program is part of the text.

All that a program can branch on has finitely many answers: which value a choice has, whether a set holds an element,
whether a text is not empty. So what a piece hangs on is written down as cases of answers, once, when the program is
translated, and a call only looks up which case it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")

MAX_CASES = 4_096
"""How many combinations of answers one statement may hang on."""


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


class Undecided(Exception):  # noqa: N818  # no error: a question to the caller
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
