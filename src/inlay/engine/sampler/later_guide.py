"""A grammar that begins to hold behind a mark: an answer may reason first."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from inlay.engine.structured import Guide

_BEFORE = 8  # tokens that are looked at in front of as many as the mark has


class LaterGuide:
    """The start of a grammar, for an answer that has not come to the mark.

    guide: of this answer alone. mark: the text behind which it holds.
    """

    def __init__(self, guide: Guide, mark: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.guide = guide
        self._mark = mark
        self._tokenizer = tokenizer
        self._kept = _BEFORE + len(tokenizer.encode(mark, add_special_tokens=False))
        self._said: list[int] = []

    def take(self, token: int) -> bool:
        """Go on behind a token; whether the grammar holds from now on. Raises as Guide.take.

        Text behind the mark in the same token belongs to the grammar, but for white space.
        """
        self._said = [*self._said, token][-self._kept :]
        text = str(self._tokenizer.decode(self._said, skip_special_tokens=False))
        at = text.rfind(self._mark)
        if at < 0:
            return False
        rest = text[at + len(self._mark) :].strip()
        for each in self._tokenizer.encode(rest, add_special_tokens=False) if rest else ():
            self.guide.take(each)
        return True


def ends_with(tokens: tuple[int, ...], mark: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt's last text is the mark, white space behind it aside."""
    last = tokens[-(_BEFORE + len(tokenizer.encode(mark, add_special_tokens=False))) :]
    return str(tokenizer.decode(list(last), skip_special_tokens=False)).rstrip().endswith(mark)
