"""Forbidden words, as in vLLM: the last token of a word may not follow the word's other tokens.

A word is tokenized alone and behind a space, as at the start of a text and inside one. Other tokenizations of the word,
as beside punctuation, are not detected.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase


class BadWords:
    """The state of one answer among forbidden words, given as non-empty lists of token ids."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = np.unique(np.array([word[0] for word in words if len(word) == 1], dtype=np.int64))
        #: Last but one token of a word → (all tokens but the last, last token), so that a step checks few words.
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *head, last in (word for word in words if len(word) > 1):
            self._longer.setdefault(head[-1], []).append((tuple(head), last))
        self._most = max((len(word) - 1 for word in words), default=0)
        self._said: tuple[int, ...] = ()  # the last tokens of the answer
        self.next = self._always

    def copy(self) -> BadWords:
        """A copy for another answer with the same state."""
        return copy.copy(self)

    def take(self, token: int) -> None:
        """Advance behind a token of the answer."""
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
        # If the space is its own token, the rest equals the word alone, which is included already.
        if len(within) == len(alone) and within[:1] != alone[:1]:
            found[within] = None
    return [ids for ids in found if ids]
