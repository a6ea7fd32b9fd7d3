"""Words that an answer must not hold, as vLLM keeps them out: the last token of each may not follow those before it.

A word is tokenized alone and behind a space, as it stands at the start of a text and within one. A word that falls
into tokens in yet another way, as beside punctuation, is not noticed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase


class BadWords:
    """Where one answer stands among words as token ids, none of them empty."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = np.unique(np.array([word[0] for word in words if len(word) == 1], dtype=np.int64))
        #: The last but one token of a word → what stands before its last one, and that: a step looks at few words.
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *head, last in (word for word in words if len(word) > 1):
            self._longer.setdefault(head[-1], []).append((tuple(head), last))
        self._most = max((len(word) - 1 for word in words), default=0)
        self._said: tuple[int, ...] = ()  # the last tokens of the answer
        self.next = self._always

    def copy(self) -> BadWords:
        """Another answer at the same place, among the same words."""
        return copy.copy(self)

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        if not self._longer:
            return
        self._said = (*self._said, token)[-self._most :]
        begun = [last for head, last in self._longer.get(token, ()) if self._said[-len(head) :] == head]
        self.next = np.union1d(self._always, np.array(begun, dtype=np.int64)) if begun else self._always


def tokenized(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """The token ids of words, each alone and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    made = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    for alone, within in zip(made[::2], made[1::2], strict=True):
        found[alone] = None
        # where the space is a token of its own, what follows it is the word alone, which is there already
        if len(within) == len(alone) and within[:1] != alone[:1]:
            found[within] = None
    return [ids for ids in found if ids]
