"""Words that an answer must not hold, as vLLM keeps them out: the last token of each may not follow those before it.

A word is tokenized alone and behind a space, as it stands at the start of a text and within one. A word that falls
into tokens in yet another way, as beside punctuation, is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase


class BadWords:
    """Where one answer stands among words as token ids, none of them empty."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._longer = [tuple(word) for word in words if len(word) > 1]
        self._most = max((len(word) - 1 for word in self._longer), default=0)
        self._said: tuple[int, ...] = ()  # the last tokens of the answer
        self.next = self._found()

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        if self._longer:
            self._said = (*self._said, token)[-self._most :]
            self.next = self._found()

    def _found(self) -> npt.NDArray[np.int64]:
        """The tokens that must not come next."""
        begun = [word[-1] for word in self._longer if self._said[1 - len(word) :] == word[:-1]]
        return np.unique(np.array([*self._always, *begun], dtype=np.int64))


def tokenized(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """The token ids of words, each alone and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        within = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found[alone] = None
        # where the space is a token of its own, what follows it is the word alone, which is there already
        if len(within) == len(alone) and within[:1] != alone[:1]:
            found[within] = None
    return [ids for ids in found if ids]
