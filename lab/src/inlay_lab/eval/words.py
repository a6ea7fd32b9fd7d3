"""Names and values of generated documents, made of syllables, numbers and short lists. Most never repeat.

A checksum decides whether a made-up word is held out, wherever it stands (as a town, a surname, a company). So training
never sees a word of an evaluation.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "br", "st", "tr", "kl")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("", "", "n", "r", "l", "s")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_HELD_OUT_SHARE = 8  # one word in eight


class Split(Enum):
    """The set of words and wordings to draw from: training's, or those held out from it.

    FIRST: as TRAIN, without the further wordings of later training.
    """

    FIRST = "first"
    TRAIN = "train"
    HELD_OUT = "held out"


@dataclass(frozen=True)
class Value:
    """A stated value.

    Attributes:
        text: As in sentences and answers, "4,820 people".
        word: In one word, "4,820", or None if it takes several.
        order: The number for comparisons, or None.
    """

    text: str
    word: str | None
    order: int | None = None


@dataclass
class Words:
    """Draws names and values of one split. ``onsets`` and ``vowels`` are the parts of syllables."""

    rng: random.Random
    split: Split
    onsets: Sequence[str] = _ONSETS
    vowels: Sequence[str] = _VOWELS

    @classmethod
    def alike(cls, rng: random.Random, split: Split) -> Words:
        """A drawer of words from nine syllables, so that many begin or end alike."""
        return cls(rng, split, rng.sample(_ONSETS, k=3), rng.sample(_VOWELS, k=3))

    def name(self, maker: str) -> str:
        """The name of a thing. ``maker`` is "place", "person", "company", "component", ..."""
        return _NAMES[maker](self)

    def value(self, maker: str) -> Value:
        """A value. ``maker`` is as in kinds.toml, "year 1100 1900"."""
        kind, *arguments = maker.split()
        return _VALUES[kind](self, *arguments)

    def word(self, syllables: int = 2) -> str:
        """A capitalised word of the split."""
        while True:
            made = "".join(self.rng.choice(self.onsets) + self.rng.choice(self.vowels) for _ in range(syllables))
            made = (made + self.rng.choice(_CODAS)).capitalize()
            if held_out(made) == (self.split is Split.HELD_OUT):
                return made

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)


def held_out(word: str) -> bool:
    """True if a made-up word is held out from inlay_lab.train."""
    return zlib.crc32(word.encode()) % _HELD_OUT_SHARE == 0


def _place(words: Words) -> str:
    return words.word(words.rng.choice((2, 2, 3)))


def _person(words: Words) -> str:
    return f"{words.word()} {words.word()}"


def _company(words: Words) -> str:
    return f"{words.word()} {words.pick('Works', 'Trust', 'Bank', 'Labs', 'Mills')}"


_NAMES: dict[str, Callable[[Words], str]] = {
    "place": _place,
    "person": _person,
    "company": _company,
    "component": lambda words: f"{words.word()}-{words.pick('gate', 'store', 'queue', 'mail', 'index')}",
    "product": lambda words: f"{words.word()} {words.pick('lamp', 'chair', 'drill', 'kettle', 'radio')}",
    "event": lambda words: f"{words.word()} {words.pick('Fest', 'Week', 'Day', 'Run', 'Night')}",
    "contract": lambda words: f"{words.word()}-{words.rng.randrange(10, 100)}",
    "dish": lambda words: f"{words.word()} {words.pick('soup', 'stew', 'pie', 'salad', 'bread')}",
    "animal": lambda words: f"{words.word()} {words.pick('finch', 'toad', 'moth', 'bat', 'eel')}",
    "ship": lambda words: f"{words.pick('Star', 'Queen', 'Moon', 'Wind')} of {words.word()}",
}


def _year(words: Words, first: str, last: str) -> Value:
    year = words.rng.randint(int(first), int(last))
    return Value(str(year), str(year), year)


def _number(words: Words, least: str, most: str, step: str, unit: str) -> Value:
    number = words.rng.randrange(int(least), int(most) + 1, int(step))
    return Value(f"{number:,} {unit}", f"{number:,}", number)


def _digits(words: Words, count: str) -> Value:
    digits = str(words.rng.randrange(10 ** (int(count) - 1), 10 ** int(count)))
    return Value(digits, digits)


def _version(words: Words) -> Value:
    version = f"{words.rng.randint(1, 9)}.{words.rng.randint(0, 40)}"
    return Value(version, version)


def _date(words: Words) -> Value:
    return Value(f"{words.rng.randint(1, 28)} {words.pick(*_MONTHS)} {words.rng.randint(1990, 2029)}", None)


def _choice(words: Words, *options: str) -> Value:
    picked = words.pick(*options)
    return Value(picked, picked)


def _named(maker: str) -> Callable[[Words], Value]:
    def make(words: Words) -> Value:
        name = words.name(maker)
        return Value(name, None if " " in name else name)

    return make


_VALUES: dict[str, Callable[..., Value]] = {
    "year": _year,
    "number": _number,
    "digits": _digits,
    "version": _version,
    "date": _date,
    "choice": _choice,
    "person": _named("person"),
    "place": _named("place"),
    "company": _named("company"),
}
