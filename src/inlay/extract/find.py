"""What repeats in a log: a front that nearly all prompts have, and runs of text that some of them hold anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inlay.extract.corpus import END, Bools, Corpus, Ints, Longs
from inlay.extract.frame import NEARLY_ALL, Frame, find_frame
from inlay.extract.join import join_runs
from inlay.extract.runs import Runs, find_runs
from inlay.extract.windows import NONE, repeated_windows

STEPS = 4


@dataclass(frozen=True)
class Found:
    """What repeats. frame: the always-present text, or None. runs: outside of it, joined; long and frequent ones alone.

    prompts: (runs,) how many different prompts hold each run.
    """

    frame: Frame | None
    runs: Runs
    prompts: Longs


def find(corpus: Corpus, *, size: int, least: int, progress: Callable[[int, int], None] | None = None) -> Found:
    """Find what repeats. size: in words. least: the prompts that must hold it.

    Every ``size`` words that stand together in ``least`` prompts are found, character for character. Without a frame
    that goes for the whole log; with one, for what the prompts that have it say behind it, in its last turn.
    """

    def step(number: int) -> None:
        if progress is not None:
            progress(number, STEPS)

    frame = find_frame(corpus, least, size)
    step(1)
    names = _names(corpus, _inside(corpus, frame), size, least)
    if frame is not None and not _frame_pays(corpus, frame, names, size, least):
        frame = None
        names = _names(corpus, _inside(corpus, None), size, least)
    step(2)
    runs = find_runs(names, size)
    step(3)
    breaks = np.concatenate((corpus.breaks, [False]))[corpus.words]  # the last one is for END
    runs = join_runs(runs, breaks, size, least)
    prompts = _prompts_of_runs(corpus, runs)
    runs = runs.only((runs.lengths >= size) & (prompts >= least))
    step(4)
    return Found(frame, runs, prompts)


def _inside(corpus: Corpus, frame: Frame | None) -> Bools:
    """By place, whether a module may stand there."""
    if frame is None:
        return np.ones(len(corpus.words), np.bool_)
    inside = np.zeros(len(corpus.words), np.bool_)
    for prompt in np.flatnonzero(frame.prompts):
        inside[frame.open_places(corpus, int(prompt))] = True
    return inside


def _names(corpus: Corpus, inside: Bools, size: int, least: int) -> Ints:
    usable = np.concatenate((corpus.usable, [False]))  # the last one is for END
    words = np.where(inside & usable[corpus.words], corpus.words, np.int32(NONE))
    return repeated_windows(words, size, least, corpus.starts[corpus.first_turns[1:]])


def _frame_pays(corpus: Corpus, frame: Frame, names: Ints, size: int, least: int) -> bool:
    """Whether the frame with what repeats behind it holds nine tenths of the words that modules alone would hold.

    Modules behind a frame are encoded with it in front of them; but prompts without the frame are left out, and so are
    turns behind its last one.
    """
    in_frame = int(frame.prompts.sum()) * frame.words(corpus)
    held = in_frame + _held(names, size)
    words = int((corpus.words != END).sum())
    elsewhere = words - in_frame - int(_inside(corpus, frame).sum())
    if held >= NEARLY_ALL * (held + elsewhere):  # even if all the rest repeats
        return True
    return held >= NEARLY_ALL * _held(_names(corpus, _inside(corpus, None), size, least), size)


def _held(names: Ints, size: int) -> int:
    """How many places are in named windows."""
    places = np.flatnonzero(names != NONE)
    return int(np.minimum(np.diff(places), size).sum()) + (size if len(places) else 0)


def _prompts_of_runs(corpus: Corpus, runs: Runs) -> Longs:
    """By run, how many different prompts hold it."""
    prompts = corpus.prompts_of(runs.starts)
    pairs = np.unique(runs.ids.astype(np.int64) * len(corpus) + prompts)
    return np.bincount(pairs // max(len(corpus), 1), minlength=len(runs.lengths))
