"""A request's rules for single tokens, as arrays that all its prompts and answers share.

One request may name hundreds of thousands of tokens and words, and ask for a thousand answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from inlay.sampling.bad_words import BadWords
from inlay.sampling.params import SamplingParams

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
