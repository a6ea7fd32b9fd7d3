"""Generated pairs of a model's answer and a right answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_WORDS = (
    "the",
    "a",
    "an",
    "An",
    "The",
    "river",
    "town",
    "1412",
    "1687",
    "Rosa",
    "TILEN",
    "ship's",
    "coal-carrier",
    "of",
)
_ENDS = ("", "", "", ",", ".", ". ", "!", ".\n", " ;", "...", " .")
_ZH = (
    "布拉镇建于一六八七年",
    "镇长是罗莎",
    "斯图河流过镇中",
    "玻璃很有名",
    "盐",
    "的",
    "了",
    "2024年",
    "Monar",
    "会议五月开工",
)
_ENDS_ZH = ("", "", "，", "。", "！", "、", "》", " ", "（", "）", "“", "…", "·", ".", "\n")
_CODE = (
    "return",
    "x",
    "=",
    "y",
    "(",
    ")",
    "[0]",
    "+",
    "area",
    "width",
    "def",
    "for",
    ":",
    "''",
    "#",
    "//",
    "`",
    "total",
)


def english(rng: random.Random, most: int = 24) -> str:
    return " ".join(rng.choice(_WORDS) + rng.choice(_ENDS) for _ in range(rng.randint(0, most)))


def chinese(rng: random.Random) -> str:
    return "".join(rng.choice(_ZH) + rng.choice(_ENDS_ZH) for _ in range(rng.randint(0, 12)))


def program(rng: random.Random) -> str:
    lines = (
        "    " * rng.randint(0, 2) + " ".join(rng.choices(_CODE, k=rng.randint(0, 9))) for _ in range(rng.randint(0, 4))
    )
    return "\n" * rng.randint(0, 2) + "\n".join(lines)


def pairs(make: Callable[[random.Random], str], count: int = 1000) -> Iterator[tuple[str, str]]:
    """A model's answer and the right one; in every third pair one contains the other, or both are equal."""
    rng = random.Random(7)
    for number in range(count):
        said, right = make(rng), make(rng)
        if number % 3 == 0:
            said = right[rng.randint(0, len(right) // 3) :] + (make(rng) if number % 2 else "")
        yield said, right
