"""Exercises: one step of a task, without what leads up to it.

Which of two numbers is larger decides a token or two of an answer of twenty, and the documents that state the numbers
take most of a conversation. Here comparisons stand alone, their numbers drawn on the spot: thirty tokens each, and only
the result counts.

And documents are repeated whole. Else no answer of training would have the words of those pairs of attribute and form
that are kept from it, and a model that has never said a word does not say it either when it should copy it.
"""

from __future__ import annotations

import random
from enum import Enum

from inlay.demo.conversations import SYSTEM, Conversation
from inlay.demo.documents import Document, write_documents
from inlay.demo.kinds import Attribute, Kind, kinds
from inlay.demo.questions import Asker, Question, compared
from inlay.demo.words import Split, Value, Words

REPEATING = "repeating"  # the task of questions for a document's whole text
_REPEAT = (
    "Repeat the document about {n}.",
    "Say again what is written about {n}.",
    "Repeat all that is said about {n}.",
)
COMPARING = "comparing"  # the task of these questions: what is stated in the answer stands in no document
_ANY_FACTS = (1, 2, 3, 4)  # of documents whose kinds are counted: how many there are must not be told from their length
_FAR = 8  # of so many numbers, the furthest from the first is taken for an easy comparison
_TRIES = (1, 1, 1, 4)  # of so many second numbers, one, the closest to the first is taken: some differ late only


class Exercise(Enum):
    """COMPARISONS: of two numbers that stand in no document, drawn for each question. EASY_COMPARISONS: questions for
    the larger of two, of as many digits and far apart: mostly, the first digits tell. REPETITIONS: of whole documents.
    KIND_COUNTS: how many documents there are of each kind.
    """

    COMPARISONS = "comparisons"
    EASY_COMPARISONS = "easy comparisons"
    REPETITIONS = "repetitions"
    KIND_COUNTS = "kind counts"


def draw_exercise(
    exercise: Exercise, rng: random.Random, split: Split, *, documents: int, questions: int
) -> Conversation:
    """A conversation of one exercise. documents: how many it has, but for comparisons, which have none."""
    words = Words(rng, split)
    match exercise:
        case Exercise.COMPARISONS | Exercise.EASY_COMPARISONS:
            written, asked = [], _comparisons(words, questions, exercise is Exercise.EASY_COMPARISONS)
        case Exercise.REPETITIONS:
            written = write_documents(words, documents)
            asked = _repetitions(rng, written, questions)
        case Exercise.KIND_COUNTS:
            written = write_documents(words, documents, _ANY_FACTS)
            asked = _kind_counts(Asker(words, written), questions)
    return Conversation(rng.choice(SYSTEM) + "\n", None, written, asked)


def _comparisons(words: Words, questions: int, easy: bool) -> list[Question]:
    comparable = [
        (kind, attribute)
        for kind in kinds()
        for attribute in kind.attributes
        if attribute.compare and (attribute.greatest or not easy)
    ]
    return [_compare(words, *words.rng.choice(comparable), easy) for _ in range(questions)]


def _repetitions(rng: random.Random, written: list[Document], questions: int) -> list[Question]:
    return [
        Question(REPEATING, rng.choice(_REPEAT).format(n=document.name), document.text)
        for document in rng.sample(written, k=min(questions, len(written)))
    ]


def _kind_counts(asker: Asker, questions: int) -> list[Question]:
    return [asker.count_of(kind) for kind in asker.rng.sample(kinds(), k=min(questions, len(kinds())))]


def _compare(words: Words, kind: Kind, attribute: Attribute, easy: bool) -> Question:
    assert attribute.compare is not None
    first, second = words.name(kind.names), words.name(kind.names)
    while first == second:
        second = words.name(kind.names)
    text = words.rng.choice(attribute.compare.of(words.split)).format(a=first, b=second)
    values = (_far_apart if easy else _any_two)(words, attribute.value)
    return compared(COMPARING, text, attribute, list(zip((first, second), values, strict=True)))


def _any_two(words: Words, maker: str) -> tuple[Value, Value]:
    first = words.value(maker)
    tries = words.rng.choice(_TRIES)
    others: list[Value] = []
    while len(others) < tries:
        other = words.value(maker)
        if other.order != first.order:
            others.append(other)
    return first, min(others, key=lambda other: _distance(first, other))


def _far_apart(words: Words, maker: str) -> tuple[Value, Value]:
    while True:
        first, *others = (words.value(maker) for _ in range(_FAR))
        alike = [each for each in others if len(each.text) == len(first.text) and each.order != first.order]
        if alike:
            return first, max(alike, key=lambda other: _distance(first, other))


def _distance(one: Value, other: Value) -> int:
    return abs((one.order or 0) - (other.order or 0))
