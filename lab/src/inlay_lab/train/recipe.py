"""The curriculum of the bundled model: the stages of its training, and the exercises between."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inlay_lab.eval.questions import Form
from inlay_lab.eval.words import Split
from inlay_lab.train.lessons import Exercise, Lesson


@dataclass(frozen=True)
class Stage:
    """A stage of training.

    Attributes:
        tokens: Of a batch, over all processes.
        rate: The learning rate at its start and end.
        drills: Lessons of some batches, instead of ``lesson``.
        drilled: The share of those batches.
        split: Of words and wordings.
    """

    name: str
    steps: int
    tokens: int
    rate: tuple[float, float]
    lesson: Lesson
    drills: tuple[Lesson, ...] = ()
    drilled: float = 0.0
    split: Split = Split.TRAIN


_COMPARING = Lesson((0, 0), 12, exercise=Exercise.COMPARISONS)
_EASY = Lesson((0, 0), 12, exercise=Exercise.EASY_COMPARISONS)
_COUNTING = Lesson((2, 12), 4, {"count": 1.0}, Form.PLAIN, facts=(1,))
_COUNTING_ANY = replace(_COUNTING, facts=(1, 2, 3, 4))
_KINDS = Lesson((2, 12), 9, exercise=Exercise.KIND_COUNTS)
_CAPITALS = Lesson((1, 3), 8, {"form": 1.0}, Form.CAPITALS)
_SENTENCES = Lesson((1, 4), 8, {"form": 1.0}, Form.SENTENCE)
_REPEATING = Lesson((1, 8), 4, exercise=Exercise.REPETITIONS)
_ALIKE = Lesson((2, 8), 20, alike=True)
_NUMBERS = (_COMPARING, _COUNTING, _CAPITALS)
_COMPARE = (_EASY, _EASY, _EASY, _COMPARING, _CAPITALS)
_ALL = (_COMPARING, _COMPARING, _COUNTING, _COUNTING, _CAPITALS, _SENTENCES)
_AGAIN = (_EASY, _EASY, _COMPARING, _COMPARING, _COUNTING)
_LAST = (_EASY, _COMPARING, _COMPARING, _COUNTING, _CAPITALS, _SENTENCES)
_REPEATED = (_COMPARING, _COMPARING, _COUNTING, _COUNTING, _CAPITALS, _SENTENCES, _REPEATING, _REPEATING)
_COUNTED = (*_REPEATED, _KINDS, _KINDS)
_TOLD_APART = (
    *(_COMPARING, _COMPARING, _COUNTING_ANY, _COUNTING_ANY, _KINDS, _KINDS, _KINDS),
    *(_CAPITALS, _SENTENCES, _REPEATING, _REPEATING, _ALIKE, _ALIKE),
)
_FEW, _SOME, _MORE = (2, 4), (2, 8), (4, 12)  # documents
_STEPS = (Exercise.CONTRADICTIONS, Exercise.CONTRADICTIONS, Exercise.SHARINGS, Exercise.RANKINGS, Exercise.RANKINGS)
_RANKED = Lesson((0, 0), 10, exercise=Exercise.RANKED_NUMBERS)
_RANKS = (Exercise.SUPERLATIVES, Exercise.SORTS)
_ACROSS = (Exercise.CONFLICTS, Exercise.CONFLICTS, Exercise.SHARED, *_RANKS)


def _exercises(documents: tuple[int, int], *exercises: Exercise) -> tuple[Lesson, ...]:
    return tuple(Lesson(documents, 8, exercise=exercise) for exercise in exercises)


_KEPT = (_COMPARING, _COUNTING_ANY, _KINDS, _CAPITALS, _SENTENCES, _REPEATING, _ALIKE)
_FACTS = {"single": 1.0}
_EIGHT = Lesson((1, 8), 20)
_TWELVE = Lesson((2, 12), 20)
RECIPE = (
    Stage("facts of three", 400, 4096, (0.001, 0.001), Lesson((1, 3), 10, _FACTS, Form.PLAIN), split=Split.FIRST),
    Stage("facts in every form", 300, 5120, (0.001, 0.001), Lesson((1, 4), 12, _FACTS), split=Split.FIRST),
    Stage("all tasks, up to six", 1000, 5120, (0.001, 0.0013), Lesson((1, 6), 16), split=Split.FIRST),
    Stage("all tasks, up to eight", 1400, 6144, (0.002, 0.002), _EIGHT, split=Split.FIRST),
    Stage("all tasks, up to twelve", 1750, 6144, (0.002, 0.00003), _TWELVE, split=Split.FIRST),
    Stage("warming up again", 50, 6144, (0.0002, 0.002), _EIGHT, _NUMBERS, 0.6, split=Split.FIRST),
    Stage("numbers by themselves", 200, 6144, (0.002, 0.002), _EIGHT, _NUMBERS, 0.6, split=Split.FIRST),
    Stage("mostly comparing", 250, 6144, (0.002, 0.002), _EIGHT, _COMPARE, 0.8, split=Split.FIRST),
    Stage("more wordings", 350, 6144, (0.002, 0.002), _EIGHT, _ALL, 0.6),
    Stage("comparing again", 400, 6144, (0.002, 0.002), _EIGHT, _AGAIN, 0.7),
    Stage("all tasks again", 2000, 6144, (0.002, 0.0007), _TWELVE, _LAST, 0.45),
    Stage("repeating as well", 1350, 6144, (0.0007, 0.00002), _TWELVE, _REPEATED, 0.45),
    Stage("warming up once more", 50, 6144, (0.0002, 0.0013), _TWELVE, _COUNTED, 0.5),
    Stage("counting kinds", 600, 6144, (0.0013, 0.0013), _TWELVE, _COUNTED, 0.5),
    Stage("telling apart", 3850, 6144, (0.0013, 0.00001), _TWELVE, _TOLD_APART, 0.5),
)

#: Further training of a model of RECIPE: questions across documents, and its earlier tasks.
FURTHER = (
    Stage(
        "across few documents",
        700,
        6144,
        (0.0013, 0.0013),
        _TWELVE,
        (_RANKED, _RANKED, _RANKED, *_exercises(_FEW, *_STEPS, *_STEPS, *_ACROSS), _COMPARING),
        0.9,
    ),
    Stage(
        "across some documents",
        900,
        6144,
        (0.0013, 0.0013),
        _TWELVE,
        (_RANKED, _RANKED, *_exercises(_FEW, *_STEPS), *_exercises(_SOME, *_STEPS, *_ACROSS), *_KEPT),
        0.9,
    ),
    Stage(
        "across more documents",
        900,
        6144,
        (0.0013, 0.00001),
        _TWELVE,
        (_RANKED, *_exercises(_SOME, *_STEPS), *_exercises(_MORE, *_STEPS, *_ACROSS), *_KEPT),
        0.85,
    ),
    Stage(
        "across documents again",
        1300,
        6144,
        (0.0012, 0.00001),
        _TWELVE,
        (
            *(_RANKED, _RANKED),
            *_exercises(_FEW, Exercise.RANKINGS),
            *_exercises(_SOME, *_STEPS, Exercise.RANKINGS, Exercise.SHARINGS, *_ACROSS),
            *_exercises(_MORE, Exercise.SHARINGS, Exercise.SHARED, Exercise.SHARED, Exercise.CONFLICTS),
            *(_COMPARING, _COUNTING_ANY, _KINDS, _SENTENCES, _ALIKE),
        ),
        0.9,
    ),
    Stage(
        "across up to twelve documents",
        3300,
        6144,
        (0.0012, 0.00001),
        _TWELVE,
        (
            *(_RANKED, _RANKED, _RANKED, _COMPARING, _COMPARING, _COMPARING),
            *_exercises(_FEW, Exercise.RANKINGS, Exercise.RANKINGS),
            *_exercises(_SOME, Exercise.RANKINGS, Exercise.RANKINGS, *_RANKS, Exercise.SHARED),
            *_exercises(_MORE, Exercise.RANKINGS, *_RANKS, Exercise.SHARINGS, Exercise.SHARINGS),
            *_exercises(_MORE, Exercise.SHARED, Exercise.SHARED, Exercise.CONTRADICTIONS),
            *_exercises(_MORE, Exercise.CONFLICTS, Exercise.CONFLICTS),
            *(_COUNTING_ANY, _COUNTING_ANY, _KINDS, _SENTENCES, _ALIKE),
        ),
        0.9,
    ),
)
