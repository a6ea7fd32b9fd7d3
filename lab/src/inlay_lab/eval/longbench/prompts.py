"""A sample as a schema and a prompt: the text before the documents, the documents as modules, and the rest as new text.

Too long texts are cut in the middle, as in the benchmark, before they become modules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any

from inlay.client.llm import LLM
from inlay.errors import ModelError, ParameterError, Place
from inlay.pml import Module, Prompt, PromptBuilder, Schema, Text, Turn, numbered
from inlay.prompt.chat import ChatTemplate
from inlay_lab.eval.longbench.data import Sample, Template
from inlay_lab.eval.longbench.datasets import Dataset

_NAME = "longbench"
_PLACE = Place(_NAME)
_LEAST = 8  # tokens of a prompt


@dataclass(frozen=True)
class Case:
    """A sample as it is asked.

    Attributes:
        head, documents, tail: The prompt's text in pieces; head and tail may be empty.
        chat: The prompt is a user turn.
        cut: The middle of the prompt was left out.
    """

    sample: Sample
    head: str
    documents: tuple[str, ...]
    tail: str
    chat: bool
    cut: bool

    def schema(self) -> Schema:
        """The text before the documents, always present, and a module for each document."""
        head = (Text(self.head, _PLACE),) if self.head else ()
        modules = [
            Module(_name(number), (Text(text, _PLACE),), _PLACE) for number, text in enumerate(self.documents, 1)
        ]
        children = (*head, *modules)
        return Schema(_NAME, numbered((Turn("user", children, _PLACE),) if self.chat else children), source=_NAME)

    def prompt(self) -> Prompt:
        """All documents, and the text behind them."""
        builder = PromptBuilder.for_schema(_NAME)
        for number in range(1, len(self.documents) + 1):
            builder = builder.use(_name(number))
        return builder.text(self.tail).build()

    def key(self, max_tokens: int) -> str:
        """A digest of the prompt and its scoring, unique among all runs."""
        of = (self.head, self.documents, self.tail, self.chat, max_tokens, self.sample.answers, self.sample.classes)
        return sha256(json.dumps(of).encode()).hexdigest()[:24]


def has_turns(llm: LLM) -> bool:
    """True if the model has a chat template that fits a prompt."""
    try:
        ChatTemplate(llm.tokenizer).pieces(("user",), generation=True)
    except ModelError:
        return False
    return True


def fitted(
    llm: LLM, dataset: Dataset, template: Template, sample: Sample, max_tokens: int, *, chat: bool, longest: int | None
) -> Case:
    """A sample as a case that leaves room for its answer.

    Args:
        chat: The model has a chat template.
        longest: Most tokens of a prompt without that template; None for as many as fit.

    Raises:
        ParameterError: There is no room for a prompt.
    """
    head, tail = template.around(sample)
    pieces = (head, *dataset.documents(sample.context), tail)
    room = llm.processor.model.max_positions - max_tokens
    limit = room if longest is None else min(longest, room)
    while limit >= _LEAST:
        kept = _cut_middle(llm.tokenizer, pieces, limit)
        case = Case(
            sample, kept[0], tuple(text for text in kept[1:-1] if text), kept[-1], chat and dataset.chat, kept != pieces
        )
        over = _tokens(llm, case) - room
        if over <= 0:
            return case
        limit -= over  # tokens of the chat template, and more that come from tokenizing in pieces
    raise ParameterError(
        f"{dataset.name}: answers have up to {max_tokens:,} tokens, which leaves no room for a prompt in the model's "
        f"context of {room + max_tokens:,}; give a smaller number in config/dataset2maxlen.json, or leave it out"
    )


def _tokens(llm: LLM, case: Case) -> int:
    llm.add_schema(case.schema(), encode=False, replace=True)
    return len(llm.lay_out(case.prompt()).ids)


def _cut_middle(tokenizer: Any, pieces: Sequence[str], limit: int) -> tuple[str, ...]:
    """Pieces of a text without its middle: about ``limit`` / 2 tokens of either end remain."""
    encoded = tokenizer("".join(pieces), return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    offsets = zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
    ends = [end for (_, end), special in offsets if not special]
    specials = len(encoded["input_ids"]) - len(ends)
    if len(ends) + specials <= limit:
        return tuple(pieces)
    front, back = max(0, limit // 2 - specials), limit // 2
    # White space belongs to the next token, which starts at the end of the token before.
    first = ends[front - 1] if front else 0
    last = max(first, ends[-back - 1])
    starts = accumulate(map(len, pieces[:-1]), initial=0)
    return tuple(
        text[: max(0, first - start)] + text[max(0, last - start) :] for start, text in zip(starts, pieces, strict=True)
    )


def _name(number: int) -> str:
    return f"document-{number}"
