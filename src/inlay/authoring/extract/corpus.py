"""The prompts of a log in memory: their texts, their words as one array of numbers, and their repeated windows.

A word is one of these: letters of one kind with their capital, digits, a rule such as ``----``, or any other single
character. Each includes one space before it. Other white space forms words too. Scripts without spaces between words
(Chinese, Japanese, Thai, …) are cut into single characters. The end of a word depends only on the characters directly
around it. So the same text is cut the same way everywhere, except for the first word or two. The words of a text,
joined, are the text.

Repeated windows of a fixed number of words are found exactly, without a hash. They are named by doubling (Karp, Miller,
Rosenberg 1972). Words have numbers, and a window of 2 n words is named by the names of its halves. Equal pairs are
found by sorting, so equal names mean equal words. A window that occurs too seldom loses its name, and so do all windows
that contain it. This keeps the arrays short if little repeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from inlay.authoring.extract.log import LogError, LoggedPrompt, LoggedTurn

_UPPER = "A-ZÀ-ÖØ-Þ"
_LOWER = "a-zß-öø-ÿ"
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(
    rf" ?(?:[{_UPPER}]?[{_LOWER}]+|[{_UPPER}]+|[0-9]+|[{_NO_SPACES}]"
    rf"|[^\W0-9_{_UPPER}{_LOWER}{_NO_SPACES}]+|[-=_*#~]+|[^\w\s])|\s+(?!\S)|\s"
)
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def split_words(text: str) -> list[str]:
    """Split a text into words. The words, joined, are the text."""
    return _WORD.findall(text)


def carried_by_xml(text: str) -> bool:
    """Return True if XML, and so a schema, can hold this text."""
    return not _NO_XML.search(text)


class Vocabulary:
    """Numbers words from 0 in the order of their first use. Equal numbers mean equal words."""

    def __init__(self) -> None:
        self._numbers = _Numbers()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the numbers of the words of a text."""
        words = split_words(text)
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the words in the order of their numbers."""
        return iter(self._numbers)


class _Numbers(dict[str, int]):
    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

END = -1
"""Follows the words of each turn, so that no run of words crosses from one turn into the next."""

MAX_WORDS = 2**27
"""The most words of a log. Finding repeats takes about 80 bytes for each."""


@dataclass(frozen=True)
class Corpus:
    """The prompts of a log.

    Attributes:
        lines: The line of each prompt, [prompts].
        first_turns: Prompt p holds the turns first_turns[p] … first_turns[p + 1] - 1, [prompts + 1].
        roles: The role of each turn, None for a prompt without turns, [turns].
        texts: The text of each turn in UTF-8, [turns].
        starts: The words of turn t are at the places starts[t] … starts[t + 1] - 2, followed by END, [turns + 1].
        words: The numbers of the words of all turns, [places].
        marks: First word and end of each part that its request marked, increasing and disjoint, [marked parts, 2].
        word_lengths: Characters of each word, [vocabulary].
        usable: Mask of the words that a schema can hold, [vocabulary].
        breaks: Mask of the words with a line break, [vocabulary].
    """

    source: str
    lines: Longs
    first_turns: Longs
    roles: tuple[str | None, ...]
    texts: tuple[bytes, ...]
    starts: Longs
    words: Ints
    marks: Longs
    word_lengths: Ints
    usable: Bools
    breaks: Bools

    @classmethod
    def of(cls, prompts: Iterable[LoggedPrompt], source: str = "<log>") -> Corpus:
        """Read all prompts. Raises LogError if they have more than ``MAX_WORDS`` words."""
        vocabulary = Vocabulary()
        lines, first_turns, starts = [], [0], [0]
        roles: list[str | None] = []
        texts: list[bytes] = []
        words: list[Ints] = []
        marks: list[tuple[int, int]] = []
        end = np.array([END], np.int32)
        for prompt in prompts:
            for turn in prompt.turns:
                found, marked = _encoded(vocabulary, turn)
                words += [found, end]
                marks += [(starts[-1] + start, starts[-1] + stop) for start, stop in marked]
                starts.append(starts[-1] + len(found) + 1)
                roles.append(turn.role)
                texts.append(turn.text.encode())
            lines.append(prompt.line)
            first_turns.append(len(roles))
            if starts[-1] > MAX_WORDS:
                part = "give a part of it, as in: head -n 10000 FILE | inlay schema from-prompts -"
                raise LogError(f"{source}: holds more than {MAX_WORDS:,} words; {part}", code="prompt.log_too_large")
        return cls(
            source=source,
            lines=np.array(lines, np.int64),
            first_turns=np.array(first_turns, np.int64),
            roles=tuple(roles),
            texts=tuple(texts),
            starts=np.array(starts, np.int64),
            words=np.concatenate(words or [end[:0]]),
            marks=np.array(marks, np.int64).reshape(-1, 2),
            word_lengths=np.fromiter(map(len, vocabulary), np.int32, len(vocabulary)),
            usable=np.fromiter(map(carried_by_xml, vocabulary), np.bool_, len(vocabulary)),
            breaks=np.fromiter(("\n" in word for word in vocabulary), np.bool_, len(vocabulary)),
        )

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.lines)

    def turns(self, prompt: int) -> range:
        """Return the turns of a prompt."""
        return range(int(self.first_turns[prompt]), int(self.first_turns[prompt + 1]))

    def places(self, turn: int) -> slice:
        """Return the places of a turn's words."""
        return slice(int(self.starts[turn]), int(self.starts[turn + 1]) - 1)

    def turn_of(self, places: Longs) -> Longs:
        """Return the turns that contain these places."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def prompts_of(self, places: Longs) -> Longs:
        """Return the prompts that contain these places."""
        return np.searchsorted(self.first_turns, self.turn_of(places), side="right") - 1

    def text(self, turn: int) -> str:
        """Return the text of a turn."""
        return self.texts[turn].decode()

    def cut(self, turn: int, borders: Iterable[int]) -> list[str]:
        """Cut the text of a turn before the words at these ascending places, into one piece more than places."""
        places = self.places(turn)
        ends = np.concatenate(([0], np.cumsum(self.word_lengths[self.words[places]], dtype=np.int64)))
        text = self.text(turn)
        characters = [0, *(int(ends[border - places.start]) for border in borders), len(text)]
        return [text[start:end] for start, end in pairwise(characters)]

    def spans(self, starts: Longs, stops: Longs) -> list[str]:
        """Return the texts of these stretches of words. Each lies within one turn. They ascend without overlap."""
        turns, first = np.unique(self.turn_of(starts), return_index=True)
        borders = np.stack((starts, stops), axis=1)
        groups = zip(turns.tolist(), np.split(borders, first[1:]), strict=True) if len(turns) else ()
        return [text for turn, group in groups for text in self.cut(turn, group.ravel().tolist())[1::2]]


def _encoded(vocabulary: Vocabulary, turn: LoggedTurn) -> tuple[Ints, list[tuple[int, int]]]:
    """The words of a turn, and the places among them of its marked parts, at whose borders words end."""
    borders = [0, *(border for mark in turn.marks for border in mark), len(turn.text)]
    pieces = [vocabulary.encode(turn.text[start:stop]) for start, stop in pairwise(borders)]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    marked = [(ends[number - 1], ends[number]) for number in range(1, len(pieces), 2)]
    return np.concatenate(pieces), marked


NONE = -1
"""No name. The window occurs too seldom, holds an unusable word, or crosses the end of a turn."""


def repeated_windows(words: Ints, size: int, least: int, prompt_ends: Longs) -> Ints:
    """Name the window of ``size`` words at each place, or NONE.

    Args:
        words: Numbers of words, and NONE for unusable words. The last one is NONE.
        size: Words of a window.
        least: Number of different prompts that must hold a named window.
        prompt_ends: The place after each prompt, [prompts].

    Returns:
        Names 0, 1, 2, … by place. Two places have the same name if and only if the same words follow them.
    """
    names, length = _renamed(words, _often(words, least)), 1
    while length < size:
        bits = max(int(names.max(initial=0)).bit_length(), 1)
        # as many shorter windows as fit into one 64-bit key; the last two may overlap
        many = min(64 // bits, -(-size // length))
        shifts = [min(number * length, size - length) for number in range(many)]
        names = _joined(names, shifts, bits, least)
        length = shifts[-1] + length
    return _in_prompts(names, least, prompt_ends)


def _often(names: Ints, least: int) -> Longs:
    """Count each name, with 0 for names that occur less than ``least`` times."""
    counts = np.bincount(names[names != NONE])
    counts[counts < least] = 0
    return counts


def _renamed(names: Ints, counts: Longs) -> Ints:
    """Renumber the names with a count as 0, 1, 2, …, and replace the others by NONE."""
    fresh = np.full(len(counts) + 1, NONE, np.int32)  # the last element is for NONE itself
    kept = np.flatnonzero(counts)
    fresh[kept] = np.arange(len(kept), dtype=np.int32)
    return fresh[names]


def _joined(names: Ints, shifts: list[int], bits: int, least: int) -> Ints:
    """Name the windows that consist of the named windows at these shifts."""
    joined = np.full_like(names, NONE)
    room = len(names) - shifts[-1]
    if room <= 0:
        return joined
    whole = names[:room] != NONE
    for shift in shifts[1:]:
        whole &= names[shift : shift + room] != NONE
    places = np.flatnonzero(whole)
    keys = np.zeros(len(places), np.uint64)
    for shift in shifts:
        keys = (keys << np.uint64(bits)) | names[places + shift].astype(np.uint64)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    group = np.cumsum(first) - 1
    often = np.bincount(group) >= least
    fresh = np.where(often, np.cumsum(often) - 1, NONE).astype(np.int32)
    joined[places[order]] = fresh[group]
    return joined


def _in_prompts(names: Ints, least: int, prompt_ends: Longs) -> Ints:
    """Keep the names of windows in at least ``least`` different prompts."""
    places = np.flatnonzero(names != NONE)
    order = np.argsort(names[places], kind="stable")  # so the prompts of one name ascend
    places = places[order]
    found, prompts = names[places], np.searchsorted(prompt_ends, places, side="right")
    fresh = np.concatenate(([True], (found[1:] != found[:-1]) | (prompts[1:] != prompts[:-1])))[: len(found)]
    counts = np.bincount(found[fresh], minlength=int(names.max(initial=NONE)) + 1)
    counts[counts < least] = 0
    return _renamed(names, counts)
