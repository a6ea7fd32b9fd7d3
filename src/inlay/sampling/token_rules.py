"""A request's rules for single tokens, as arrays that all its prompts and answers share.

One request may name hundreds of thousands of tokens and words, and ask for a thousand answers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from inlay.sampling.params import SamplingParams


class BadWords:
    """The state of one answer among forbidden words, given as non-empty lists of token ids.

    As in vLLM, the last token of a word may not follow the word's other tokens.
    """

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
    """The token ids of words, each alone and behind a space, as at the start of a text and inside one.

    Other tokenizations of a word, as beside punctuation, are not detected.
    """
    found: dict[tuple[int, ...], None] = {}
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    made = [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    for alone, within in zip(made[::2], made[1::2], strict=True):
        found[alone] = None
        # If the space is its own token, the rest equals the word alone, which is included already.
        if len(within) == len(alone) and within[:1] != alone[:1]:
            found[within] = None
    return [ids for ids in found if ids]


Ids = npt.NDArray[np.int64]


class TokenRules:
    """The parameters that name tokens. Rows only read them.

    Args:
        params: the sampling parameters.
        stop_ids: the tokens that end an answer; ``min_tokens`` delays them.
        never: tokens that are forbidden at every step.
        bad_words: the state at the start of an answer; each answer continues with a copy.

    Attributes:
        allowed: the only allowed tokens, ascending and without repeats, or None for all.
        bias_ids, biases: ``logit_bias``.
        never: ascending.
        early: the tokens forbidden before ``min_tokens``.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: Collection[int] = (),
        never: Collection[int] = (),
        bad_words: BadWords | None = None,
    ) -> None:
        self.allowed = None if params.allowed_token_ids is None else _each_once(params.allowed_token_ids)
        biases = params.logit_bias or {}
        self.bias_ids: Ids = np.fromiter(biases, np.int64, len(biases))
        self.biases = np.fromiter(biases.values(), np.float32, len(biases))
        self.never: Ids = np.array(sorted(never), dtype=np.int64)
        self.early: Ids = np.array(sorted({*never, *stop_ids, *params.stop_ids}), dtype=np.int64)
        self.bad_words = bad_words
        self._bits: npt.NDArray[np.uint32] | None = None

    def allowed_bits(self, words: int) -> npt.NDArray[np.uint32]:
        """One bit per allowed token, the lowest first, (words,). Only valid if ``allowed`` is not None."""
        if self._bits is None or len(self._bits) != words:
            flags = np.zeros(words * 32, dtype=np.uint8)
            flags[self.allowed] = 1
            self._bits = np.packbits(flags, bitorder="little").view(np.uint32)
        return self._bits


def _each_once(tokens: Sequence[int]) -> Ids:
    """Distinct token ids in ascending order, without sorting: there may be a quarter of a million."""
    ids = np.array(tokens, dtype=np.int64)
    flags = np.zeros(int(ids.max()) + 1, dtype=bool)
    flags[ids] = True
    return np.flatnonzero(flags)
