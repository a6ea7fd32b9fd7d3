"""Training data: conversations over documents, exercises between them, and batches of both.

An exercise is one step of a task without its preparation. A comparison of two numbers decides a token or two of an
answer of twenty, and its documents take most of a conversation. In an exercise comparisons stand alone: random numbers,
thirty tokens each, and only the result counts. Repetitions of whole documents train the words of held-out pairs of
attribute and form. A model that never generated a word does not copy it either.

A batch is token ids, positions, and the weight of each next token. Attention is plain causal throughout. Positions
start
anywhere in the context, and in some conversations jump between documents, as if the model had seen long texts.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inlay_lab.eval.conversations import SYSTEM, Conversation, draw_conversation
from inlay_lab.eval.documents import FACTS, Attribute, Document, Kind, kinds, write_documents
from inlay_lab.eval.questions import Asker, Form, Question, compared
from inlay_lab.eval.words import Split, Value, Words
from inlay_lab.train.across import contradictions, one_question, ranked_numbers, rankings, sharings
from inlay_lab.train.architecture import CONTEXT
from inlay_lab.train.tokenizer import ASSISTANT_TURN, BOS, END, SYSTEM_TURN, USER_TURN

REPEATING = "repeating"  # the task of questions for a document's whole text
_REPEAT = (
    "Repeat the document about {n}.",
    "Say again what is written about {n}.",
    "Repeat all that is said about {n}.",
)
COMPARING = "comparing"  # the task of comparisons of numbers that no document states
_ANY_FACTS = (1, 2, 3, 4)  # of documents whose kinds are counted: their length must not reveal the number
_FAR = 8  # easy comparisons take the number furthest from the first, of this many
_TRIES = (1, 1, 1, 4)  # second numbers to draw; the closest to the first is used, so that some differ late only

_TEXT_WEIGHT = 0.01  # of a token outside answers, beside 1 for one inside: most of them are random
_TEXT_SHARE = 0.1  # share of such tokens that count at all
_RESULT_WEIGHT = 4.0  # of the tokens of a result: few, but all others lead up to them
_CONCLUDED = re.compile(r", so( [^:,;]+)")  # a result within or at the end of an answer
_ROUND = 32  # the width of a batch is a multiple of this: libraries cache code and memory for every size
_GAPPED, _GAP = 0.3, 60  # the share of conversations with gaps, and the longest gap in positions


class Exercise(Enum):
    """Kinds of exercises.

    - COMPARISONS: of two random numbers that no document states.
    - EASY_COMPARISONS: of two numbers far apart with equally many digits, so that mostly the first digits decide.
    - REPETITIONS: of whole documents.
    - KIND_COUNTS: the number of documents of each kind.
    - CONTRADICTIONS, SHARINGS, RANKINGS, RANKED_NUMBERS: steps of ``across`` towards the following tasks.
    - SUPERLATIVES, SORTS, CONFLICTS, SHARED: the tasks of ``inlay_lab.eval.across``.
    """

    COMPARISONS = "comparisons"
    EASY_COMPARISONS = "easy comparisons"
    REPETITIONS = "repetitions"
    KIND_COUNTS = "kind counts"
    CONTRADICTIONS = "contradictions"
    SHARINGS = "sharings"
    RANKINGS = "rankings"
    RANKED_NUMBERS = "ranked numbers"
    SUPERLATIVES = "superlatives"
    SORTS = "sorts"
    CONFLICTS = "conflicts"
    SHARED = "shared"


#: The exercises that are tasks of ``inlay_lab.eval.across``, with the task's name.
TASKS = {
    Exercise.SUPERLATIVES: "superlative",
    Exercise.SORTS: "sort",
    Exercise.CONFLICTS: "conflict",
    Exercise.SHARED: "shared",
}


def draw_exercise(
    exercise: Exercise, rng: random.Random, split: Split, *, documents: int, questions: int
) -> Conversation:
    """A conversation of one exercise. ``documents`` is their number; comparisons have none."""
    words = Words(rng, split)
    written: list[Document] = []
    match exercise:
        case Exercise.COMPARISONS | Exercise.EASY_COMPARISONS:
            asked = _comparisons(words, questions, exercise is Exercise.EASY_COMPARISONS)
        case Exercise.RANKED_NUMBERS:
            asked = ranked_numbers(words, questions)
        case Exercise.REPETITIONS:
            written = write_documents(words, documents)
            asked = _repetitions(rng, written, questions)
        case Exercise.KIND_COUNTS:
            written = write_documents(words, documents, _ANY_FACTS)
            asked = _kind_counts(Asker(words, written), questions)
        case Exercise.CONTRADICTIONS:
            written, asked = contradictions(words, documents, questions)
        case Exercise.SHARINGS:
            written, asked = sharings(words, documents, questions)
        case Exercise.RANKINGS:
            written, asked = rankings(words, documents, questions)
        case _:
            written, asked = one_question(words, TASKS[exercise], documents)
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


Row: TypeAlias = tuple[list[int], list[int], list[float]]  # ids, positions and weights of one conversation


@dataclass(frozen=True)
class Batch:
    """A batch of conversations.

    Attributes:
        ids, positions: (sequences, tokens), int64.
        weights: (sequences, tokens), float32: the weight of predicting each token; 0 for a row's first and for padding.
    """

    ids: Tensor
    positions: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Lesson:
    """The kind of conversations in a batch.

    Attributes:
        documents: Least and most documents; all conversations of a batch have equally many.
        questions: Most questions of each.
        mix: The weight of each task, or None for the usual one.
        form: Of the answers, or None for any.
        facts: The numbers of facts that a document may state.
        alike: Make many names begin or end like others.
        exercise: An exercise to ask instead, or None. Comparisons have no documents.
    """

    documents: tuple[int, int]
    questions: int
    mix: dict[str, float] | None = None
    form: Form | None = None
    facts: tuple[int, ...] = FACTS
    alike: bool = False
    exercise: Exercise | None = None


class Encoder:
    """Turns conversations into token ids, run by run, as a prompt of modules is tokenized."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._fast: Any = tokenizer.backend_tokenizer  # less overhead, which matters for short texts
        marks = (BOS, END, SYSTEM_TURN, USER_TURN, ASSISTANT_TURN)
        ids: Any = tokenizer.convert_tokens_to_ids(list(marks))
        self.bos, self.end, self.system, self.user, self.assistant = ids

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def conversation(self, drawn: Conversation) -> tuple[list[list[int]], list[tuple[list[int], list[int]]]]:
        """The runs before the first question (head, then one per document), and (question, answer) ids with marks."""
        head = [self.bos, self.system, *self(drawn.system), self.end, self.user]
        runs = [head] + [self(document.text + "\n") for document in drawn.documents]
        turns = []
        for index, question in enumerate(drawn.questions):
            opening = [] if index == 0 else [self.user]
            turns.append(
                ([*opening, *self(question.text), self.end, self.assistant], [*self(question.answer), self.end])
            )
        return runs, turns

    def weights(self, question: Question) -> list[float]:
        """The weight of each token of a question's answer, and of its end of turn."""
        said = self._fast.encode(question.answer, add_special_tokens=False)
        results = [match.span(1) for match in _CONCLUDED.finditer(question.answer)]
        results.append((len(question.answer) - len(question.result), len(question.answer)))
        before = 0.0 if question.task == COMPARING else 1.0
        concluded = [any(first < end and last > begin for begin, end in results) for first, last in said.offsets]
        return [_RESULT_WEIGHT if each else before for each in concluded] + [1.0]

    def flat(self, drawn: Conversation) -> list[int]:
        """All ids of a conversation in a row."""
        runs, turns = self.conversation(drawn)
        return [i for run in (*runs, *(part for turn in turns for part in turn)) for i in run]


def answering(
    rng: random.Random,
    encoder: Encoder,
    split: Split,
    lesson: Lesson,
    *,
    tokens: int,
    gapped: float = _GAPPED,
) -> tuple[Batch, list[Conversation]]:
    """Conversations of about ``tokens`` tokens together, padded to a common rounded width, as a batch and as drawn.

    Args:
        gapped: Share of conversations with gaps between documents.
    """
    documents = rng.randint(*lesson.documents)
    drawn: list[Conversation] = []
    rows: list[Row] = []
    longest = 0
    while not rows or longest * (len(rows) + 1) <= tokens:
        conversation = _converse(rng, split, lesson, documents)
        row = _row(rng, encoder, conversation, gapped)
        longest = max(longest, len(row[0]))
        drawn.append(conversation)
        rows.append(row)
    return _batch(rows, longest, encoder.end), drawn


def _converse(rng: random.Random, split: Split, lesson: Lesson, documents: int) -> Conversation:
    if lesson.exercise is not None:
        return draw_exercise(lesson.exercise, rng, split, documents=documents, questions=lesson.questions)
    return draw_conversation(
        rng,
        split,
        documents=documents,
        questions=lesson.questions,
        form=lesson.form,
        mix=lesson.mix,
        facts=lesson.facts,
        alike=lesson.alike,
    )


def _batch(rows: list[Row], longest: int, padding: int) -> Batch:
    ids = torch.full((len(rows), -(-longest // _ROUND) * _ROUND), padding)
    positions, weights = torch.zeros_like(ids), torch.zeros(ids.shape)
    for index, (row_ids, row_positions, row_weights) in enumerate(rows):
        ids[index, : len(row_ids)] = torch.tensor(row_ids)
        positions[index, : len(row_ids)] = torch.tensor(row_positions)
        weights[index, : len(row_ids)] = torch.tensor(row_weights)
    return Batch(ids, positions, weights)


def _row(rng: random.Random, encoder: Encoder, drawn: Conversation, gapped: float) -> Row:
    runs, turns = encoder.conversation(drawn)
    with_gaps = rng.random() < gapped
    ids: list[int] = []
    positions: list[int] = []
    weights: list[float] = []
    at = 0

    def put(run: list[int], counts: list[float]) -> None:
        nonlocal at
        ids.extend(run)
        positions.extend(range(at, at + len(run)))
        weights.extend(counts)
        at += len(run)

    def text(run: list[int]) -> list[float]:
        return [_TEXT_WEIGHT if rng.random() < _TEXT_SHARE else 0.0 for _ in run]

    for run in runs:
        put(run, text(run))
        at += rng.randint(0, _GAP) if with_gaps else 0
    for question, (asked, answer) in zip(drawn.questions, turns, strict=True):
        put(asked, text(asked))
        put(answer, encoder.weights(question))
    weights[0] = 0.0
    start = rng.randrange(max(1, CONTEXT - at)) if rng.random() < 0.5 else 0
    return ids, [start + position for position in positions], weights
