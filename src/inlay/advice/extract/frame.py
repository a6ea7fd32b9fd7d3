"""The front that (nearly) all prompts of a log have: whole turns, and the beginning of the turn behind them.

From runs to candidates for modules: short runs join their neighbours, and so do those that nearly always meet.

Runs are split wherever the set of places changes, so one prompt with a document that breaks off in its middle splits
that document for all. A module should be the whole document: where two neighbours nearly always stand together they
become one, and places where one of them stands alone keep what is left of it. What is too short to be a module joins a
neighbour, rather on the same line than across a line break: a heading that several documents share belongs to what
follows it.

What repeats in a log: a front that nearly all prompts have, and runs of text that some of them hold anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

from inlay.advice.extract.corpus import END, NONE, Bools, Corpus, Ints, Longs, repeated_windows
from inlay.advice.extract.runs import Runs, find_runs

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


TOGETHER = 0.9
MAX_ROUNDS = 200


@dataclass(frozen=True)
class _State:
    """runs: so far. claims: (runs,) how many occurrences the longest-established part of each run had; 0 if short."""

    runs: Runs
    claims: Longs


def join_runs(runs: Runs, breaks: Bools, size: int, least: int) -> Runs:
    """Join neighbouring runs, pair by pair.

    breaks: by place, whether the word there holds a line break.
    size: runs of fewer words are short. Two short runs join if they meet at ``least`` places. Others join if they
        stand together at nine in ten of the places where either of those that are not short is, and if a short one
        brings more words than are lost at the other places.
    """
    runs = _cut_at_breaks(runs, breaks, size)
    counts = np.bincount(runs.ids, minlength=len(runs.lengths))
    state = _State(runs, np.where(runs.lengths >= size, counts, 0))
    for _ in range(MAX_ROUNDS):
        chosen = _pairs(state, breaks, least)
        if not len(chosen):
            break
        state = _join(state, chosen, size)
    return state.runs


def _cut_at_breaks(runs: Runs, breaks: Bools, size: int) -> Runs:
    """The runs, with the short ones cut in two behind their last line break."""
    ids, first = np.unique(runs.ids, return_index=True)
    heads = np.zeros(len(runs.lengths), np.int64)  # words before the cut; 0 for none
    for run, start in zip(ids, runs.starts[first], strict=True):
        length = runs.lengths[run]
        if 1 < length < size:
            behind = np.flatnonzero(breaks[start : start + length - 1])
            heads[run] = behind[-1] + 1 if len(behind) else 0
    cut = np.flatnonzero(heads)
    tail_of = np.zeros(len(heads), np.int32)
    tail_of[cut] = len(heads) + np.arange(len(cut))
    lengths = np.concatenate((np.where(heads > 0, heads, runs.lengths), runs.lengths[cut] - heads[cut]))
    halved = heads[runs.ids] > 0
    starts = np.concatenate((runs.starts, runs.starts[halved] + heads[runs.ids[halved]]))
    order = np.argsort(starts, kind="stable")
    return Runs(starts[order], np.concatenate((runs.ids, tail_of[runs.ids[halved]]))[order], lengths)


def _pairs(state: _State, breaks: Bools, least: int) -> Longs:
    """The pairs to join now, (pairs, 3): left, right, how often. No run is left in one and right in another."""
    runs, known = state.runs, len(state.runs.lengths)
    meet = np.flatnonzero(_adjacent(runs))
    codes, one, counts = np.unique(_codes(runs)[meet], return_index=True, return_counts=True)
    left, right = codes // max(known, 1), codes % max(known, 1)
    fit = (left != right) & (counts >= least) & _pays(state, left, right, counts)
    pairs = np.stack((left, right, counts), axis=1)[fit]
    # what is long takes what is short, for as long as that pays; then short ones join each other
    both_short = (state.claims[pairs[:, :2]] == 0).all(axis=1)
    pairs = pairs[np.lexsort((-pairs[:, 2], _seams(breaks, runs.starts[meet[one[fit]] + 1]), both_short))]
    # each run is left or right in this round: what it is in the first of its pairs
    first = np.full((2, known), len(pairs))
    for side in (0, 1):
        np.minimum.at(first[side], pairs[:, side], np.arange(len(pairs)))
    is_left = first[0] < first[1]
    taken: Longs = pairs[is_left[pairs[:, 0]] & ~is_left[pairs[:, 1]]]
    return taken


def _seams(breaks: Bools, places: Longs) -> Longs:
    """How well a border before these places suits the text: 0 within a line, 1 before a line break, 2 behind one.

    Pairs with a border that suits ill join first.
    """
    return np.where(breaks[places], np.int64(1), np.where(breaks[places - 1], np.int64(2), np.int64(0)))


def _pays(state: _State, left: Longs, right: Longs, counts: Longs) -> Bools:
    """Whether these runs, which meet so often, should join."""
    lengths = state.runs.lengths
    lost = [np.maximum(state.claims[side] - counts, 0) for side in (left, right)]
    together = counts >= TOGETHER * np.maximum(state.claims[left], state.claims[right])
    short_left, short_right = (state.claims[side] == 0 for side in (left, right))
    gains_left = ~short_left | short_right | (counts * lengths[left] >= lost[1] * lengths[right])
    gains_right = ~short_right | short_left | (counts * lengths[right] >= lost[0] * lengths[left])
    pays: Bools = together & gains_left & gains_right
    return pays


def _adjacent(runs: Runs) -> Bools:
    """By occurrence, whether the next one begins where it ends."""
    return np.concatenate((runs.stops[:-1] == runs.starts[1:], [False]))[: len(runs.starts)]


def _codes(runs: Runs) -> Longs:
    """By occurrence, a number for the pair of it and the next one."""
    following = np.concatenate((runs.ids[1:], [0]))[: len(runs.ids)]
    return runs.ids.astype(np.int64) * len(runs.lengths) + following


def _join(state: _State, pairs: Longs, size: int) -> _State:
    runs, known = state.runs, len(state.runs.lengths)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    known_codes, codes = pairs[:, 0] * known + pairs[:, 1], _codes(runs)
    which = np.minimum(np.searchsorted(known_codes, codes), len(pairs) - 1)
    joins = _adjacent(runs) & (known_codes[which] == codes)
    ids = np.where(joins, known + which, runs.ids).astype(np.int32)
    kept = np.concatenate(([True], ~joins[:-1]))[: len(ids)]
    lengths = np.concatenate((runs.lengths, runs.lengths[pairs[:, :2]].sum(axis=1)))
    claims = state.claims[pairs[:, :2]].max(axis=1)
    claims[claims == 0] = pairs[claims == 0, 2]
    claims[lengths[known:] < size] = 0
    return _State(Runs(runs.starts[kept], ids[kept], lengths), np.concatenate((state.claims, claims)))


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
