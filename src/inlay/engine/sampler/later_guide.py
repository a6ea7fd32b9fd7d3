"""A grammar that begins to hold behind a mark: an answer may reason first."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from inlay.engine.structured import Guide

_BEFORE = 8  # tokens that are looked at in front of as many as the mark has


class LaterGuide:
    """The start of a grammar, for an answer that has not come to the mark.

    guide: of this answer alone. mark: the text behind which it holds.
    opening: the grammar of the mark that opens what stands before; an answer that does not begin with it is in its
        language from its first token. None where all of them begin within.
    """

    def __init__(
        self, guide: Guide, mark: str, tokenizer: PreTrainedTokenizerBase, opening: Guide | None = None
    ) -> None:
        self._guide = guide
        self._mark = mark
        self._tokenizer = tokenizer
        self._kept = _BEFORE + len(tokenizer.encode(mark, add_special_tokens=False))
        self._said: list[int] = []
        self._opening = opening
        self._direct = None if opening is None else guide.copy()
        self.over = False  # whether the grammar holds to the end from now on

    @property
    def now(self) -> Guide | None:
        """What holds for the next token; None for nothing."""
        if self._direct is None:
            return self._opening
        self._direct.beside = self._opening
        return self._direct

    def take(self, token: int) -> Guide | None:
        """Go on behind a token; what holds from now on. Raises as Guide.take.

        Text behind the mark in the same token belongs to the grammar, but for white space.
        """
        if self._opening is not None:
            return self._begin(token, self._opening)
        self._said = [*self._said, token][-self._kept :]
        text = str(self._tokenizer.decode(self._said, skip_special_tokens=False))
        at = text.rfind(self._mark)
        if at < 0:
            return None
        self.over = True
        rest = text[at + len(self._mark) :].strip()
        for each in self._tokenizer.encode(rest, add_special_tokens=False) if rest else ():
            self._guide.take(each)
        return self._guide

    def _begin(self, token: int, opening: Guide) -> Guide | None:
        """The answer is in its language, or opens what stands before: until one of them cannot be, both may be."""
        if not opening.follows(token):
            self.over = True
            direct = self._guide if self._direct is None else self._direct
            direct.beside = None
            direct.take(token)
            return direct
        if self._direct is not None and not self._direct.follows(token):
            self._direct = None
        if opening.complete:
            self._direct = self._opening = None
        return self.now


def ends_with(tokens: tuple[int, ...], mark: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt's last text is the mark, white space behind it aside."""
    last = tokens[-(_BEFORE + len(tokenizer.encode(mark, add_special_tokens=False))) :]
    return str(tokenizer.decode(list(last), skip_special_tokens=False)).rstrip().endswith(mark)
