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
from inlay.demo.questions import Form
from inlay.demo.tokenizer import ASSISTANT_TURN, BOS, END, SYSTEM_TURN, USER_TURN
from inlay.demo.words import Split

_TEXT_WEIGHT = 0.01  # of a token that is not part of an answer, beside 1 for one that is: most of them are made up
_TEXT_SHARE = 0.1  # of such tokens that count at all
_GAPPED, _GAP = 0.3, 60  # the share of conversations with gaps, and the longest gap, in positions

Row: TypeAlias = tuple[list[int], list[int], list[float]]  # ids, positions and weights of one conversation


@dataclass(frozen=True)
class Batch:
    """ids, positions: (sequences, tokens), int64. weights: the same, float32: what predicting each token counts; the
    first token of a row and padding count nothing."""

    ids: Tensor
    positions: Tensor
    weights: Tensor


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

    def flat(self, drawn: Conversation) -> list[int]:
        """All of a conversation's ids in a row."""
        runs, turns = self.conversation(drawn)
        return [i for run in (*runs, *(part for turn in turns for part in turn)) for i in run]


def answering(
    rng: random.Random,
    encoder: Encoder,
    split: Split,
    *,
    tokens: int,
    documents: int,
    questions: int,
    gapped: float = _GAPPED,
    form: Form | None = None,
    mix: dict[str, float] | None = None,
) -> tuple[Batch, list[Conversation]]:
    """Conversations of about ``tokens`` tokens together, padded to the longest, with what was drawn.

    mix, form: as in ``draw_conversation``. gapped: the share of conversations with gaps between documents.
    """
    drawn: list[Conversation] = []
    rows: list[Row] = []
    longest = 0
    while not rows or longest * (len(rows) + 1) <= tokens:
        conversation = draw_conversation(rng, split, documents=documents, questions=questions, form=form, mix=mix)
        row = _row(rng, *encoder.conversation(conversation), gapped)
        longest = max(longest, len(row[0]))
        drawn.append(conversation)
        rows.append(row)
    return _batch(rows, longest, encoder.end), drawn


def _batch(rows: list[Row], longest: int, padding: int) -> Batch:
    ids = torch.full((len(rows), longest), padding)
    positions, weights = torch.zeros_like(ids), torch.zeros(ids.shape)
    for index, (row_ids, row_positions, row_weights) in enumerate(rows):
        ids[index, : len(row_ids)] = torch.tensor(row_ids)
        positions[index, : len(row_ids)] = torch.tensor(row_positions)
        weights[index, : len(row_ids)] = torch.tensor(row_weights)
    return Batch(ids, positions, weights)


def _row(
    rng: random.Random,
    runs: list[list[int]],
    turns: list[tuple[list[int], list[int]]],
    gapped: float,
) -> Row:
    with_gaps = rng.random() < gapped
    ids: list[int] = []
    positions: list[int] = []
    weights: list[float] = []
    at = 0

    def put(run: list[int], weight: float) -> None:
        nonlocal at
        ids.extend(run)
        positions.extend(range(at, at + len(run)))
        weights.extend(weight if weight == 1 or rng.random() < _TEXT_SHARE else 0.0 for _ in run)
        at += len(run)

    for run in runs:
        put(run, _TEXT_WEIGHT)
        at += rng.randint(0, _GAP) if with_gaps else 0
    for asked, answer in turns:
        put(asked, _TEXT_WEIGHT)
        put(answer, 1.0)
    weights[0] = 0.0
    start = rng.randrange(max(1, CONTEXT - at)) if rng.random() < 0.5 else 0
    return ids, [start + position for position in positions], weights
