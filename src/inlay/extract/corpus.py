"""The prompts of a log in memory: their texts, and their words as one long array of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from inlay.extract.log import LogError, LoggedPrompt
from inlay.extract.words import Vocabulary, carried_by_xml

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

END = -1
"""What follows the words of each turn, so that no run of words goes from one turn into the next."""

MAX_WORDS = 2**27
"""The most words of a log; finding what repeats takes about 80 bytes for each."""


@dataclass(frozen=True)
class Corpus:
    """The prompts of a log.

    lines: (prompts,) the line of each prompt.
    first_turns: (prompts + 1,) prompt p holds the turns first_turns[p] … first_turns[p + 1] - 1.
    roles, texts: (turns,) the role of each turn, None for a prompt without turns, and its text in UTF-8.
    starts: (turns + 1,) the words of turn t stand at the places starts[t] … starts[t + 1] - 2, and END behind them.
    words: the words of all turns, as numbers.
    word_lengths: (vocabulary,) in characters.
    usable: (vocabulary,) whether a schema can hold the word.
    breaks: (vocabulary,) whether the word holds a line break.
    """

    source: str
    lines: Longs
    first_turns: Longs
    roles: tuple[str | None, ...]
    texts: tuple[bytes, ...]
    starts: Longs
    words: Ints
    word_lengths: Ints
    usable: Bools
    breaks: Bools

    @classmethod
    def of(cls, prompts: Iterable[LoggedPrompt], source: str = "<log>") -> Corpus:
        """Read all prompts. Raises LogError where there are more words than ``MAX_WORDS``."""
        vocabulary = Vocabulary()
        lines, first_turns, starts = [], [0], [0]
        roles: list[str | None] = []
        texts: list[bytes] = []
        words: list[Ints] = []
        end = np.array([END], np.int32)
        for prompt in prompts:
            for turn in prompt.turns:
                found = vocabulary.encode(turn.text)
                words += [found, end]
                starts.append(starts[-1] + len(found) + 1)
                roles.append(turn.role)
                texts.append(turn.text.encode())
            lines.append(prompt.line)
            first_turns.append(len(roles))
            if starts[-1] > MAX_WORDS:
                part = "give a part of it, as in: head -n 10000 FILE | inlay schema from-prompts -"
                raise LogError(f"{source}: holds more than {MAX_WORDS:,} words; {part}")
        return cls(
            source=source,
            lines=np.array(lines, np.int64),
            first_turns=np.array(first_turns, np.int64),
            roles=tuple(roles),
            texts=tuple(texts),
            starts=np.array(starts, np.int64),
            words=np.concatenate(words or [end[:0]]),
            word_lengths=np.fromiter(map(len, vocabulary), np.int32, len(vocabulary)),
            usable=np.fromiter(map(carried_by_xml, vocabulary), np.bool_, len(vocabulary)),
            breaks=np.fromiter(("\n" in word for word in vocabulary), np.bool_, len(vocabulary)),
        )

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self.lines)

    def turns(self, prompt: int) -> range:
        """The turns of a prompt."""
        return range(int(self.first_turns[prompt]), int(self.first_turns[prompt + 1]))

    def places(self, turn: int) -> slice:
        """The places of a turn's words."""
        return slice(int(self.starts[turn]), int(self.starts[turn + 1]) - 1)

    def turn_of(self, places: Longs) -> Longs:
        """The turns in which these places are."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def prompts_of(self, places: Longs) -> Longs:
        """The prompts in which these places are."""
        return np.searchsorted(self.first_turns, self.turn_of(places), side="right") - 1

    def text(self, turn: int) -> str:
        """The text of a turn."""
        return self.texts[turn].decode()

    def cut(self, turn: int, borders: Iterable[int]) -> list[str]:
        """The text of a turn, cut before the words at these places; they rise. One piece more than there are places."""
        places = self.places(turn)
        ends = np.concatenate(([0], np.cumsum(self.word_lengths[self.words[places]], dtype=np.int64)))
        text = self.text(turn)
        characters = [0, *(int(ends[border - places.start]) for border in borders), len(text)]
        return [text[start:end] for start, end in pairwise(characters)]

    def spans(self, starts: Longs, stops: Longs) -> list[str]:
        """The texts of these stretches of words, each within one turn; they rise and do not overlap."""
        turns, first = np.unique(self.turn_of(starts), return_index=True)
        borders = np.stack((starts, stops), axis=1)
        groups = zip(turns.tolist(), np.split(borders, first[1:]), strict=True) if len(turns) else ()
        return [text for turn, group in groups for text in self.cut(turn, group.ravel().tolist())[1::2]]
