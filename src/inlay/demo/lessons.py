"""Batches to learn from: token ids, positions, and how much each next token counts.

Attention is plain causal throughout. Positions start anywhere in the context, and in some conversations jump between
documents, as they do for models that have seen long texts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inlay.demo.architecture import CONTEXT
from inlay.demo.conversations import Conversation, draw_conversation
from inlay.demo.documents import FACTS
from inlay.demo.exercises import COMPARING, Exercise, draw_exercise
from inlay.demo.questions import Form, Question
from inlay.demo.tokenizer import ASSISTANT_TURN, BOS, END, SYSTEM_TURN, USER_TURN
from inlay.demo.words import Split

_TEXT_WEIGHT = 0.01  # of a token that is not part of an answer, beside 1 for one that is: most of them are made up
_TEXT_SHARE = 0.1  # of such tokens that count at all
_RESULT_WEIGHT = 4.0  # of the tokens of a result: few, and all before them leads up to it
_ROUND = 32  # the width of a batch is a multiple of this: libraries keep code and memory for every size they meet
_GAPPED, _GAP = 0.3, 60  # the share of conversations with gaps, and the longest gap, in positions

Row: TypeAlias = tuple[list[int], list[int], list[float]]  # ids, positions and weights of one conversation


@dataclass(frozen=True)
class Batch:
    """ids, positions: (sequences, tokens), int64. weights: the same, float32: what predicting each token counts; the
    first token of a row and padding count nothing."""

    ids: Tensor
    positions: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Lesson:
    """What the conversations of a batch are like.

    documents: the least and most that they have; a batch's have as many as one another. questions: of each, at most.
    mix: the weight of each task, or None for the usual one. form: of the answers, or None for any.
    facts: the numbers of facts that a document may state. alike: whether many names begin or end like others.
    exercise: what is asked instead of all that, if anything; comparisons have no documents.
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
        self._fast: Any = tokenizer.backend_tokenizer  # less work around it, which counts for short texts
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
        """What each token of a question's answer counts, its end of turn included."""
        tokens, of_result = len(self(question.answer)), len(self(question.result))
        before = 0.0 if question.task == COMPARING else 1.0
        return [before] * (tokens - of_result) + [_RESULT_WEIGHT] * of_result + [1.0]

    def flat(self, drawn: Conversation) -> list[int]:
        """All of a conversation's ids in a row."""
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
    """Conversations of about ``tokens`` tokens together, padded to the longest and a round width, with what was drawn.

    gapped: the share of conversations with gaps between documents.
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
