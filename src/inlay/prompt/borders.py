"""Cuts token ids into pieces whose borders depend on the text around them, so that equal text is cut alike anywhere.

A place is a border if no place near it has a higher rank. The rank is the kind of the place, then a hash of the 16
tokens behind it. Headings and code fences come first, then blank lines, line ends and sentence ends, then all other
places. The rule looks at most 320 tokens to each side. So a text is cut alike behind any other text, except near its
ends.
"""

from __future__ import annotations

import re
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

#: The fewest and the most tokens of a piece. Most paragraphs are longer than the fewest, so the borders of documents
#: are found, even if all paragraphs look alike.
LEAST, MOST = 32, 1024

_WINDOW = 16  # tokens
_FACTOR = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_FACTOR, power, 2**64) for power in range(1, _WINDOW + 1)], np.uint64)
_HASH_BITS = 48

#: Of each kind of place, the tokens to both sides in which no other place has a higher rank. A narrow range makes more
#: borders. Kinds: any place, the end of a line or sentence, a blank line, a heading or fence.
_RANGES = (320, 192, 32, 32)
_PLAIN, _LINE, _BLANK, _HEADING = range(4)

#: Bits of a token. _ENDS_LINES counts line ends at its end, up to 2, in two bits.
_WHITE, _ENDS_LINES, _SENTENCE, _HEAD, _FENCE, _BREAKS = 1, 2, 8, 16, 32, 64
_HEADS = re.compile(r"#|<[A-Za-z]|---|===|\[\d*\]?$")
_FENCES = ("```", "~~~")
_ENDS = re.compile(r"[.!?。！？][\"')\]]*\s*$")

Ids = npt.NDArray[np.uint32]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Borders:
    """Cuts the token ids of one tokenizer.

    Args:
        tokenizer: names the text of each token. Its special and added tokens are never part of a piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def pieces(self, ids: Ids) -> list[tuple[int, int]]:
        """Return the pieces of a text as first and last-plus-one token, in order.

        Text before a special token, and text behind it, are cut apart. Pieces of fewer than LEAST tokens are left out.
        """
        known = len(self._special)  # a model may have more ids than its tokenizer
        outside = np.flatnonzero((ids >= known) | self._special[np.minimum(ids, known - 1)])
        edges = [-1, *outside.tolist(), len(ids)]
        found = []
        for before, end in pairwise(edges):
            first = before + 1
            if end - first >= LEAST:
                cuts = self._cuts(ids[first:end])
                found += [(first + a, first + b) for a, b in pairwise(cuts) if b - a >= LEAST]
        return found

    def _cuts(self, ids: Ids) -> list[int]:
        """Return the borders of a text without special tokens, with its start and its end."""
        kinds = self._kinds(ids)
        ranks = (kinds.astype(np.int64) << _HASH_BITS) | _hashes(ids)
        chosen = np.zeros(len(ids), bool)
        for kind, reach in enumerate(_RANGES):
            here = kinds == kind
            if here.any():
                chosen |= here & _highest(ranks, reach)
        chosen[0] = False
        cuts = [0, *np.flatnonzero(chosen).tolist(), len(ids)]
        return [0, *(cut for before, end in pairwise(cuts) for cut in _bounded(before, end, first=before == 0))]

    def _kinds(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Return the kind of the place before each token."""
        bits = self._bits[ids]
        lines = bits // _ENDS_LINES & 3
        white_line = (bits & _WHITE > 0) & (lines > 0)
        before, lines_before = _shifted(bits), _shifted(lines)
        ends_line = lines_before > 0
        blank = (lines_before > 1) | (_shifted(white_line) & (_shifted(lines_before) > 0))
        fence = (bits & _FENCE > 0) & ~np.append(bits[1:] & _BREAKS > 0, True)  # one that opens has a language
        kinds = np.where(ends_line | (before & _SENTENCE > 0), _LINE, _PLAIN).astype(np.uint8)
        kinds[blank] = _BLANK
        kinds[ends_line & ((bits & _HEAD > 0) | fence)] = _HEADING
        kinds[white_line] = _PLAIN  # blank lines belong to the piece before them
        return kinds

    @cached_property
    def _bits(self) -> npt.NDArray[np.uint8]:
        """The bits of each token."""
        every = [[i] for i in range(len(self._tokenizer))]
        texts = self._tokenizer.batch_decode(every, clean_up_tokenization_spaces=False)
        return np.array([_bits_of(str(text)) for text in texts], np.uint8)

    @cached_property
    def _special(self) -> npt.NDArray[np.bool_]:
        """True for each token that is no text."""
        special = np.zeros(len(self._tokenizer), bool)
        added = (i for i, token in self._tokenizer.added_tokens_decoder.items() if token.content.strip())
        known = [i for i in {*added, *self._tokenizer.all_special_ids} if i < len(special)]
        special[known] = True
        return special


def _bits_of(text: str) -> int:
    """Return the bits of a token with this text."""
    lines = text[len(text.rstrip()) :].count("\n")
    return (
        (_WHITE if text and not text.strip() else 0)
        | min(lines, 2) * _ENDS_LINES
        | (_SENTENCE if _ENDS.search(text) else 0)
        | (_HEAD if _HEADS.match(text) else 0)
        | (_FENCE if text.startswith(_FENCES) else 0)
        | (_BREAKS if text.startswith("\n") else 0)
    )


def _shifted(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """Return for each token the value of the token before it, and zero for the first."""
    return np.concatenate((np.zeros(1, values.dtype), values[:-1]))


def _hashes(ids: Ids) -> npt.NDArray[np.int64]:
    """Return a hash of the 16 tokens from each token on. The last 15 tokens have the hash 0."""
    found = np.zeros(len(ids), np.int64)
    views = np.lib.stride_tricks.sliding_window_view((ids.astype(np.uint64) + 1) * np.uint64(_FACTOR), _WINDOW)
    mixed = views @ _POWERS
    mixed ^= mixed >> np.uint64(29)
    found[: len(views)] = ((mixed * np.uint64(_FACTOR)) >> np.uint64(64 - _HASH_BITS)).astype(np.int64)
    return found


def _highest(ranks: npt.NDArray[np.int64], reach: int) -> npt.NDArray[np.bool_]:
    """Return True where no rank within ``reach`` before is as high, and none within ``reach`` behind is higher."""
    count, none = len(ranks), np.iinfo(np.int64).min
    padded = np.full(-(-count // reach) * reach + 2 * reach, none, np.int64)
    padded[reach : reach + count] = ranks
    blocks = padded.reshape(-1, reach)
    ahead = np.maximum.accumulate(blocks, axis=1).ravel()  # from the start of the block
    behind = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()  # to the end of the block
    most = np.maximum(behind[: len(padded) - reach + 1], ahead[reach - 1 :])  # of ``reach`` tokens from each
    return (ranks > most[:count]) & (ranks >= most[reach + 1 : reach + 1 + count])


def _bounded(before: int, end: int, *, first: bool) -> list[int]:
    """Return the end of a piece, with more borders if the piece is longer than MOST.

    They count from the border that does not depend on the text before the piece: the end of a text's first piece.
    """
    if first:
        return [*reversed(range(end - MOST, before, -MOST)), end]
    return [*range(before + MOST, end, MOST), end]
