"""A grammar that applies only behind a mark, so that an answer may reason first."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from inlay.sampling.structured import Guide

_BEFORE = 8  # tokens decoded in addition to the mark's own length


class LaterGuide:
    """The start of a grammar, for an answer that has not reached the mark.

    Args:
        guide: for this answer alone.
        mark: the text behind which the grammar applies.
        opening: the grammar of the mark that opens the reasoning. An answer without it follows ``guide`` from its first
            token. None if every answer starts inside the reasoning.
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
        self.over = False  # True once the grammar applies up to the end

    @property
    def now(self) -> Guide | None:
        """The guide for the next token; None for no restriction."""
        if self._direct is None:
            return self._opening
        self._direct.beside = self._opening
        return self._direct

    def take(self, token: int) -> Guide | None:
        """Advance behind a token and return the guide for the next one. Raises like Guide.take.

        Text behind the mark in the same token belongs to the grammar, except white space.
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
        """Advance while the answer may still start with the opening mark or follow the grammar directly."""
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
    """True if the prompt's text ends with the mark, ignoring trailing white space."""
    last = tokens[-(_BEFORE + len(tokenizer.encode(mark, add_special_tokens=False))) :]
    return str(tokenizer.decode(list(last), skip_special_tokens=False)).rstrip().endswith(mark)
