"""The front that (nearly) all prompts of a log have: whole turns, and the beginning of the turn behind them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from inlay.extract.corpus import END, Bools, Corpus, Longs

NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Frame:
    """Text that a schema can hold outside of modules: always present, and in front of all that differs.

    example: the turns of one prompt that has this front; all but the last are whole.
    opening: how many words of the last turn belong to it.
    prompts: (prompts,) which prompts have this front.
    """

    example: range
    opening: int
    prompts: Bools

    def words(self, corpus: Corpus) -> int:
        """How many words it has."""
        whole = sum(len(corpus.words[corpus.places(turn)]) for turn in self.example[:-1])
        return whole + self.opening

    def open_places(self, corpus: Corpus, prompt: int) -> slice:
        """The places of a prompt that has this front where it may go on in its own way: the rest of the last turn."""
        places = corpus.places(corpus.turns(prompt)[len(self.example) - 1])
        return slice(places.start + self.opening, places.stop)


def find_frame(corpus: Corpus, least: int, size: int) -> Frame | None:
    """The longest front that nine prompts in ten and at least ``least`` have, or None if there is no text in it.

    In chats it ends in a user turn: only there can a prompt say more behind it. If it says less than ``size`` words of
    that turn, it is whole lines or the whole turn, and only what all prompts say that have the turns before.
    """
    if not len(corpus):
        return None
    prompt, turns, opening, whole = _majority(corpus, max(least, ceil(NEARLY_ALL * len(corpus))))
    example = corpus.turns(prompt)[:turns]
    while example and corpus.roles[example[-1]] not in (None, "user"):
        example = example[:-1]
    if not example:
        return None
    last = corpus.words[corpus.places(example[-1])]
    if len(example) < turns:  # it goes on behind this turn
        opening, whole = len(last), True
    if opening < size and not whole:
        lines = np.flatnonzero(corpus.breaks[last[:opening]])
        opening = int(lines[-1]) + 1 if len(lines) else 0
    frame = _frame(corpus, example, opening)
    if opening < size:
        without = _frame(corpus, example, 0)
        frame = frame if np.array_equal(frame.prompts, without.prompts) else without
    return frame if frame.words(corpus) else None


def _frame(corpus: Corpus, example: range, opening: int) -> Frame:
    return Frame(example, opening, np.array([_has(corpus, other, example, opening) for other in range(len(corpus))]))


def _majority(corpus: Corpus, least: int) -> tuple[int, int, int, bool]:
    """Follow what ``least`` prompts say, word by word, for as long as they agree.

    Gives one of these prompts, the turns it has begun, the words of the last of them, and whether that turn is whole.
    """
    left = np.arange(len(corpus))
    turns = words = 0
    while True:
        roles = [_role(corpus, int(prompt), turns) for prompt in left]
        role = max(sorted(set(roles)), key=roles.count)
        kept = np.array([one == role for one in roles])
        if not role or kept.sum() < least:
            return int(left[0]), turns, words, True
        left = left[kept]
        turns += 1
        left, words, whole = _majority_of_turn(corpus, left, turns - 1, least)
        if not whole:
            return int(left[0]), turns, words, False


def _majority_of_turn(corpus: Corpus, left: Longs, turn: int, least: int) -> tuple[Longs, int, bool]:
    """Those that agree to the end of this turn, or for as long as enough do; how many words; whether it is the end."""
    places = corpus.starts[corpus.first_turns[left] + turn]
    words = 0
    while True:
        said = corpus.words[places]
        word = said[0]
        kept = said == word
        if not kept.all():
            values, counts = np.unique(said, return_counts=True)
            word = values[counts.argmax()]
            kept = said == word
        if kept.sum() < least or (word != END and not corpus.usable[word]):
            return left, words, False
        left = left[kept]
        if word == END:
            return left, words, True
        places = places[kept] + 1
        words += 1


def _role(corpus: Corpus, prompt: int, turn: int) -> str:
    turns = corpus.turns(prompt)
    return (corpus.roles[turns[turn]] or "none") if turn < len(turns) else ""


def _has(corpus: Corpus, prompt: int, example: range, opening: int) -> bool:
    turns = corpus.turns(prompt)[: len(example)]
    if [corpus.roles[turn] for turn in turns] != [corpus.roles[turn] for turn in example]:
        return False
    if any(corpus.texts[one] != corpus.texts[other] for one, other in zip(turns[:-1], example[:-1], strict=True)):
        return False
    one, other = (corpus.words[corpus.places(turn)][:opening] for turn in (turns[-1], example[-1]))
    return bool(np.array_equal(one, other))
