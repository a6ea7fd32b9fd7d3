"""Text → words: the pieces that the finder compares.

A word is a run of letters of one kind (with its capital), a run of digits, a rule such as ``----``, or any other single
character, each with the one space in front of it; and white space. Scripts without spaces between words (Chinese,
Japanese, Thai, …) are cut into single characters. Where a word ends depends on the characters right around alone, so
the same text is cut the same way wherever it stands, but for the first word or two. Nothing is lost: the words of a
text, put together, are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_UPPER = "A-ZÀ-ÖØ-Þ"
_LOWER = "a-zß-öø-ÿ"
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(
    rf" ?(?:[{_UPPER}]?[{_LOWER}]+|[{_UPPER}]+|[0-9]+|[{_NO_SPACES}]"
    rf"|[^\W0-9_{_UPPER}{_LOWER}{_NO_SPACES}]+|[-=_*#~]+|[^\w\s])|\s+(?!\S)|\s"
)
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def split_words(text: str) -> list[str]:
    """The words of a text, in order; together they are the text."""
    return _WORD.findall(text)


def carried_by_xml(text: str) -> bool:
    """Whether XML, and so a schema, can hold this text."""
    return not _NO_XML.search(text)


class Vocabulary:
    """Numbers words, from 0 in the order in which they first appear. Equal numbers mean equal words."""

    def __init__(self) -> None:
        self._numbers = _Numbers()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The numbers of the words of a text."""
        words = split_words(text)
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        """The words, in the order of their numbers."""
        return iter(self._numbers)


class _Numbers(dict[str, int]):
    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number
