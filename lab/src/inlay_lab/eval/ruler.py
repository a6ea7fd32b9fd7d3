"""Synthetic long-context tasks in the manner of RULER (arXiv 2404.06654), cut into passages. The texts are our own.

A prompt has passages of noise. Facts stand at random places in some of them, so an answer needs text from one passage
(needle, multikey) or from many (variables, words).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from inlay.errors import ParameterError
from inlay_lab.eval.reading_data import Data, Question

_NOISE = (
    "The rain stopped before noon, and the streets dried in the wind.",
    "A path leads along the river to the old mill.",
    "Two boats lay at the pier, and nobody stood on deck.",
    "The shop on the corner sells bread, lamps and rope.",
    "In the evening the square was empty again.",
    "Far hills turned blue as the light went.",
)
_KEYS = ("amber", "basil", "cedar", "dune", "ember", "fjord", "grove", "heron", "iris", "jade", "kelp", "lotus")
_WORDS = ("anchor", "barrel", "candle", "dagger", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle")
_RARE = ("lantern", "marble", "needle", "orchard", "pepper", "quarry", "ribbon", "saddle", "timber", "valley", "window")
_HOPS = 4  # variables of a chain
_COMMON = 3  # words to find

#: A drawn prompt: its passages, the question, the right answers, and the number of the passage with the answer.
_Drawn = tuple[list[str], str, tuple[str, ...], int | None]


def needle(draw: random.Random, passages: int, sentences: int) -> _Drawn:
    """One number in one passage."""
    texts = _noise(draw, passages, sentences)
    return _ask_for_one(draw, texts, draw.sample(_KEYS, 1))


def multikey(draw: random.Random, passages: int, sentences: int) -> _Drawn:
    """A number for a different key in every passage; one is asked for."""
    texts = _noise(draw, passages, sentences)
    return _ask_for_one(
        draw, texts, [f"{_KEYS[n % len(_KEYS)]} {n}" for n in draw.sample(range(max(100, passages)), passages)]
    )


def variables(draw: random.Random, passages: int, sentences: int) -> _Drawn:
    """A chain of assignments over the passages, in order; all variables with one value are asked for."""
    texts = _noise(draw, passages, sentences)
    names = [f"VAR_{letter}" for letter in draw.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", _HOPS)]
    value = str(draw.randrange(10_000, 100_000))
    places = sorted(draw.randrange(passages) for _ in names)
    for number, (name, at) in enumerate(zip(names, places, strict=True)):
        source = value if number == 0 else names[number - 1]
        texts[at].append(f"{name} = {source}.")  # later assignments stand behind earlier ones
    return _joined(texts), f"Which variables have the value {value}?", tuple(names), None


def words(draw: random.Random, passages: int, sentences: int) -> _Drawn:
    """Lists of words; the three most common ones are asked for."""
    common = draw.sample(_WORDS, _COMMON)
    texts = []
    for _ in range(passages):
        listed = [*common * 3, *draw.sample(_RARE, min(len(_RARE), max(1, sentences)))]
        draw.shuffle(listed)
        texts.append([f"{' '.join(listed)}."])
    return _joined(texts), f"Which {_COMMON} words are the most common in the lists?", tuple(common), None


#: Name of a task → its generator.
TASKS: dict[str, Callable[[random.Random, int, int], _Drawn]] = {
    "needle": needle,
    "multikey": multikey,
    "variables": variables,
    "words": words,
}


def ruler_data(task: str, *, questions: int, passages: int, sentences: int = 8, seed: int = 0) -> Data:
    """Return generated questions, each with passages of its own.

    Args:
        task: A name of TASKS.
        questions: Their number, at least 2.
        passages: Of each prompt, at least 2.
        sentences: Of noise in a passage.

    Raises:
        ParameterError: For an unknown task, or too few of something.
    """
    if task not in TASKS:
        raise ParameterError(f"there is no task {task!r}; use {', '.join(TASKS)}", code="parameter.unknown_choice")
    for name, value, least in (("questions", questions, 2), ("passages", passages, 2), ("sentences", sentences, 1)):
        if value < least:
            raise ParameterError(f"{name} is {value}; give at least {least}", code="parameter.out_of_range")
    draw = random.Random(f"{task} {seed}")
    texts: dict[str, str] = {}
    made: list[Question] = []
    for number in range(questions):
        drawn, text, answers, gold = TASKS[task](draw, passages, sentences)
        names = tuple(f"{number}/{place}" for place in range(passages))
        texts |= dict(zip(names, drawn, strict=True))
        at = "" if gold is None else names[gold]
        made.append(Question(text, at, answers, "", names, every=len(answers) > 1))
    others = [made[number - 1].gold for number in range(questions)]
    return Data(texts, tuple(replace(one, other=other) for one, other in zip(made, others, strict=True)))


def _noise(draw: random.Random, passages: int, sentences: int) -> list[list[str]]:
    return [[draw.choice(_NOISE) for _ in range(sentences)] for _ in range(passages)]


def _ask_for_one(draw: random.Random, texts: list[list[str]], keys: list[str]) -> _Drawn:
    """Hide a number for each key, in passages of their own if there are enough, and ask for one of them."""
    places = draw.sample(range(len(texts)), len(keys))
    numbers = draw.sample(range(1_000_000, 10_000_000), len(keys))
    for key, number, at in zip(keys, numbers, places, strict=True):
        texts[at].insert(draw.randrange(len(texts[at]) + 1), f"The special number for {key} is {number}.")
    asked = draw.randrange(len(keys))
    question = f"What is the special number for {keys[asked]}?"
    return _joined(texts), question, (str(numbers[asked]),), places[asked]


def _joined(texts: list[list[str]]) -> list[str]:
    return [" ".join(sentences) for sentences in texts]
