"""What the bundled model learns, in which order: the stages of its training, and the exercises between."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.demo.documents import FACTS
from inlay.demo.questions import Form


@dataclass(frozen=True)
class Drill:
    """What the conversations of a batch are like.

    documents: the least and most that one has; 0 for comparisons of numbers that stand in no document.
    questions: how many one asks. mix: the weight of each task, or None for the usual one.
    form: of its answers, or None for any. facts: the numbers of facts that a document may state.
    easy: whether comparisons without documents are of numbers far apart. repeat: whether documents are to be repeated.
    """

    documents: tuple[int, int]
    questions: int
    mix: dict[str, float] | None = None
    form: Form | None = None
    facts: tuple[int, ...] = FACTS
    easy: bool = False
    repeat: bool = False


@dataclass(frozen=True)
class Stage:
    """A stretch of training.

    documents: the least and most that a conversation has. mix: the weight of each task, or None for the usual one.
    tokens: of a batch, over all processes. rate: the learning rate at its start and end.
    drilled: the share of batches that are one of the drills instead.
    """

    name: str
    steps: int
    documents: tuple[int, int]
    tokens: int
    rate: tuple[float, float]
    mix: dict[str, float] | None = None
    form: Form | None = None
    questions: int = 8
    drills: tuple[Drill, ...] = ()
    drilled: float = 0.0


_COMPARING = Drill((0, 0), 12)
_EASY = Drill((0, 0), 12, easy=True)
_COUNTING = Drill((2, 12), 4, {"count": 1.0}, Form.PLAIN, facts=(1,))
_CAPITALS = Drill((1, 3), 8, {"form": 1.0}, Form.CAPITALS)
_SENTENCES = Drill((1, 4), 8, {"form": 1.0}, Form.SENTENCE)
_REPEATING = Drill((1, 8), 4, repeat=True)
_NUMBERS = (_COMPARING, _COUNTING, _CAPITALS)
_COMPARE = (_EASY, _EASY, _EASY, _COMPARING, _CAPITALS)
_ALL = (_COMPARING, _COMPARING, _COUNTING, _COUNTING, _CAPITALS, _SENTENCES)
_AGAIN = (_EASY, _EASY, _COMPARING, _COMPARING, _COUNTING)
_LAST = (_EASY, _COMPARING, _COMPARING, _COUNTING, _CAPITALS, _SENTENCES)
_REPEATED = (_COMPARING, _COMPARING, _COUNTING, _COUNTING, _CAPITALS, _SENTENCES, _REPEATING, _REPEATING)
_FACTS = {"single": 1.0}
RECIPE = (
    Stage("facts of three", 400, (1, 3), 4096, (0.001, 0.001), _FACTS, Form.PLAIN, questions=10),
    Stage("facts in every form", 300, (1, 4), 5120, (0.001, 0.001), _FACTS, questions=12),
    Stage("all tasks, up to six", 1000, (1, 6), 5120, (0.001, 0.0013), questions=16),
    Stage("all tasks, up to eight", 1400, (1, 8), 6144, (0.002, 0.002), questions=20),
    Stage("all tasks, up to twelve", 1750, (2, 12), 6144, (0.002, 0.00003), questions=20),
    Stage("warming up again", 50, (1, 8), 6144, (0.0002, 0.002), questions=20, drills=_NUMBERS, drilled=0.6),
    Stage("numbers by themselves", 200, (1, 8), 6144, (0.002, 0.002), questions=20, drills=_NUMBERS, drilled=0.6),
    Stage("mostly comparing", 250, (1, 8), 6144, (0.002, 0.002), questions=20, drills=_COMPARE, drilled=0.8),
    Stage("more wordings", 350, (1, 8), 6144, (0.002, 0.002), questions=20, drills=_ALL, drilled=0.6),
    Stage("comparing again", 400, (1, 8), 6144, (0.002, 0.002), questions=20, drills=_AGAIN, drilled=0.7),
    Stage("all tasks again", 2000, (2, 12), 6144, (0.002, 0.0007), questions=20, drills=_LAST, drilled=0.45),
    Stage("repeating as well", 1350, (2, 12), 6144, (0.0007, 0.00002), questions=20, drills=_REPEATED, drilled=0.45),
)
