"""Finds repeated text in a log: a front that nearly all prompts share, and runs of text that occur anywhere.

The front consists of whole turns and the start of the next turn. A part with ``cache_control`` is one run, whole, also
where another prompt holds the same text without a mark.

Then the runs that become modules are chosen, and their places in each prompt are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from inlay.authoring.extract.runs import (
    END,
    NONE,
    Bools,
    Corpus,
    Ints,
    Longs,
    Runs,
    find_runs,
    join_runs,
    repeated_windows,
)
from inlay.pml.nodes import MAX_BYTES

Encode = Callable[[Sequence[str]], list[Sequence[int]]]
"""Encodes texts into token ids, each text alone."""

ROOM = MAX_BYTES * 9 // 10  # the rest is for tags and for errors of the estimate


@dataclass(frozen=True, slots=True)
class SharedText:
    """A text that becomes a module, with its tokens and the number of different prompts that hold it."""

    text: str
    tokens: int
    prompts: int

    @property
    def worth(self) -> int:
        """The tokens that are saved if every prompt but the first reads the text from the cache."""
        return self.tokens * (self.prompts - 1)


@dataclass(frozen=True)
class Cover:
    """The occurrences of pieces in the log, in the order of their places. A piece occurs once in a prompt.

    Attributes:
        starts: The first place of each occurrence, [occurrences].
        stops: The place after each occurrence, [occurrences].
        pieces: The index of each occurrence's piece, [occurrences].
        bounds: Prompt p has the occurrences bounds[p] … bounds[p + 1] - 1, [prompts + 1].
    """

    starts: Longs
    stops: Longs
    pieces: Ints
    bounds: Longs

    def of(self, prompt: int) -> slice:
        """Return the occurrences in a prompt."""
        return slice(int(self.bounds[prompt]), int(self.bounds[prompt + 1]))


@dataclass(frozen=True)
class ChosenPieces:
    """The pieces that become modules, by falling worth, and the pieces that a schema has no room for."""

    pieces: tuple[SharedText, ...]
    cover: Cover
    left_out: tuple[SharedText, ...]


def choose(corpus: Corpus, found: Found, encode: Encode, *, min_tokens: int, max_modules: int) -> ChosenPieces:
    """Choose runs of at least ``min_tokens`` tokens, up to ``max_modules`` and the size limit of a schema."""
    runs = found.runs
    first = np.sort(np.unique(runs.ids, return_index=True)[1])
    ids = runs.ids[first]
    texts = corpus.spans(runs.starts[first], runs.stops[first])
    tokens = [len(encoded) for encoded in encode(texts)]
    pieces = [SharedText(*values) for values in zip(texts, tokens, found.prompts[ids].tolist(), strict=True)]
    long = [index for index, piece in enumerate(pieces) if piece.tokens >= min_tokens]
    ranked = sorted(long, key=lambda index: -pieces[index].worth)  # pieces of equal worth keep their order in the log
    taken = _fitting([pieces[index].text for index in ranked], max_modules)
    chosen = [index for index, fits in zip(ranked, taken, strict=True) if fits]
    left_out = [index for index, fits in zip(ranked, taken, strict=True) if not fits]
    return ChosenPieces(
        pieces=tuple(pieces[index] for index in chosen),
        cover=_cover(corpus, runs, ids[chosen]),
        left_out=tuple(pieces[index] for index in left_out),
    )


def _fitting(texts: list[str], most: int) -> list[bool]:
    """Return True for each text that fits into one schema, in order. A text that is too large is skipped."""
    room, left = ROOM, most
    fitting = []
    for text in texts:
        size = _written_size(text)
        fits = left > 0 and size <= room
        fitting.append(fits)
        if fits:
            room, left = room - size, left - 1
    return fitting


def _written_size(text: str) -> int:
    """Return an upper bound of a text's bytes in a schema, with escapes and indentation."""
    return len(text.encode()) + sum(
        text.count(one) * cost for one, cost in {"&": 5, "<": 4, ">": 4, "\r": 5, "\n": 8}.items()
    )


def _cover(corpus: Corpus, runs: Runs, ids: Ints) -> Cover:
    piece_of = np.full(len(runs.lengths), -1, np.int32)
    piece_of[ids] = np.arange(len(ids), dtype=np.int32)
    kept = np.flatnonzero(piece_of[runs.ids] >= 0)
    pieces = piece_of[runs.ids[kept]]
    prompts = corpus.prompts_of(runs.starts[kept])
    # a prompt imports a module once, at its first place
    first = np.sort(np.unique(prompts * (len(ids) + 1) + pieces, return_index=True)[1])
    kept = kept[first]
    bounds = np.searchsorted(prompts[first], np.arange(len(corpus) + 1))
    return Cover(runs.starts[kept], runs.stops[kept], pieces[first], bounds)


_BEGINNING = 8  # words that are compared before the whole text is


def find_marked(corpus: Corpus, inside: Bools, least: int) -> Runs:
    """Return the marked texts that at least ``least`` different prompts contain.

    Texts with characters that no schema can contain are left out. If texts overlap, the marked text is taken, else the
    first.

    Args:
        corpus: the prompts.
        inside: by place, True if a module may stand there.
        least: the least number of prompts.
    """
    usable = inside & np.concatenate((corpus.usable, [False]))[corpus.words]  # the last one is for END
    texts: dict[bytes, list[int]] = {}  # the places at which each text is marked
    for start, stop in corpus.marks.tolist():
        if usable[start:stop].all():
            texts.setdefault(corpus.words[start:stop].tobytes(), []).append(start)
    taken = ~usable
    for text, places in texts.items():
        for place in places:
            taken[place : place + len(text) // corpus.words.itemsize] = True
    order = np.argsort(corpus.words, kind="stable")
    in_order = corpus.words[order]
    starts: list[int] = []
    ids: list[int] = []
    lengths: list[int] = []
    for text, places in texts.items():
        words = np.frombuffer(text, corpus.words.dtype)
        unmarked = _elsewhere(corpus.words, words, order, in_order) if len(places) > 1 else []
        for place in unmarked:
            if not taken[place : place + len(words)].any():
                taken[place : place + len(words)] = True
                places.append(place)
        if len(np.unique(corpus.prompts_of(np.array(places, np.int64)))) >= least:
            starts += places
            ids += [len(lengths)] * len(places)
            lengths.append(len(words))
    by_place = np.argsort(np.array(starts, np.int64), kind="stable")
    return Runs(np.array(starts, np.int64)[by_place], np.array(ids, np.int32)[by_place], np.array(lengths, np.int64))


def _elsewhere(words: Ints, text: Ints, order: Longs, in_order: Ints) -> list[int]:
    """Return the places of a sequence of words, marked or not.

    Args:
        words: the words of all places.
        text: the sequence.
        order, in_order: the places of all words, sorted by the number of the word.
    """
    places = order[slice(*np.searchsorted(in_order, [text[0], text[0] + 1]))]
    places = places[places + len(text) <= len(words)]
    for number in range(1, min(len(text), _BEGINNING)):
        places = places[words[places + number] == text[number]]
    return [int(place) for place in places if np.array_equal(words[place : place + len(text)], text)]


NEARLY_ALL = 0.9
STEPS = 4


@dataclass(frozen=True)
class SchemaFrame:
    """Text that a schema can hold outside of modules: always present, and before all differences.

    Attributes:
        example: The turns of one prompt with this front. All but the last are whole.
        opening: Number of words of the last turn that belong to the front.
        prompts: Mask of the prompts that have this front, [prompts].
    """

    example: range
    opening: int
    prompts: Bools

    def words(self, corpus: Corpus) -> int:
        """Return the number of words in the front."""
        whole = sum(len(corpus.words[corpus.places(turn)]) for turn in self.example[:-1])
        return whole + self.opening

    def open_places(self, corpus: Corpus, prompt: int) -> slice:
        """Return the places of the rest of the last turn, in a prompt that has this front."""
        places = corpus.places(corpus.turns(prompt)[len(self.example) - 1])
        return slice(places.start + self.opening, places.stop)


def find_frame(corpus: Corpus, least: int, size: int) -> SchemaFrame | None:
    """Return the longest front of at least nine prompts in ten and at least ``least``, or None if it has no text.

    In chats the front ends in a user turn, because a prompt can add text only there. A front with fewer than ``size``
    words of its last turn must consist of whole lines or of the whole turn. All prompts with the turns before must
    share these words. Otherwise the front has no words of that turn.
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
    if len(example) < turns:  # the majority continues after this turn
        opening, whole = len(last), True
    if opening < size and not whole:
        lines = np.flatnonzero(corpus.breaks[last[:opening]])
        opening = int(lines[-1]) + 1 if len(lines) else 0
    opening = _outside_marks(corpus, example[-1], opening)
    frame = _frame(corpus, example, opening)
    if opening < size:
        without = _frame(corpus, example, 0)
        frame = frame if np.array_equal(frame.prompts, without.prompts) else without
    return frame if frame.words(corpus) else None


def _outside_marks(corpus: Corpus, turn: int, opening: int) -> int:
    """Return the number of words of an opening that ends before a marked part, if it would cut the part in two."""
    start = int(corpus.starts[turn])
    for first, behind in corpus.marks[(corpus.marks[:, 0] >= start) & (corpus.marks[:, 1] < corpus.starts[turn + 1])]:
        if first < start + opening < behind:
            return int(first) - start
    return opening


def _frame(corpus: Corpus, example: range, opening: int) -> SchemaFrame:
    return SchemaFrame(
        example, opening, np.array([_has(corpus, other, example, opening) for other in range(len(corpus))])
    )


def _majority(corpus: Corpus, least: int) -> tuple[int, int, int, bool]:
    """Follow the words that at least ``least`` prompts share, as far as they agree.

    Returns:
        One of these prompts, its number of turns so far, the words of its last turn, and whether that turn is whole.
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
    """Follow one turn while at least ``least`` prompts agree.

    Returns:
        The prompts that still agree, the number of words, and whether the turn ends there.
    """
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


@dataclass(frozen=True)
class Found:
    """The repeated text of a log.

    Attributes:
        frame: The always-present text, or None.
        runs: Joined runs outside of the frame that are long and frequent enough.
        prompts: Number of different prompts that hold each run, [runs].
    """

    frame: SchemaFrame | None
    runs: Runs
    prompts: Longs


def find(corpus: Corpus, *, size: int, least: int, progress: Callable[[int, int], None] | None = None) -> Found:
    """Find repeated text.

    Every sequence of ``size`` words that occurs in ``least`` prompts is found exactly. Parts that requests marked come
    first: a part that ``least`` prompts hold is a run. With a frame, only its prompts are searched, from the end of the
    frame to the end of its last turn.

    Args:
        size: Words of the shortest sequence.
        least: Number of different prompts that must hold it.
        progress: Called with the finished steps and STEPS.
    """

    def step(number: int) -> None:
        if progress is not None:
            progress(number, STEPS)

    frame = find_frame(corpus, least, size)
    step(1)
    repeats = _Repeats.of(corpus, frame, size, least)
    if frame is not None and not _frame_pays(corpus, frame, repeats, size, least):
        frame = None
        repeats = _Repeats.of(corpus, None, size, least)
    step(2)
    runs = find_runs(repeats.names, size)
    step(3)
    breaks = np.concatenate((corpus.breaks, [False]))[corpus.words]  # the last element is for END
    runs = join_runs(runs, breaks, size, least)
    runs = runs.only((runs.lengths >= size) & (_prompts_of_runs(corpus, runs) >= least))
    runs = repeats.marked.beside(runs)
    step(4)
    return Found(frame, runs, _prompts_of_runs(corpus, runs))


@dataclass(frozen=True)
class _Repeats:
    """The text that may become modules.

    Attributes:
        marked: Whole marked parts.
        names: The name of the repeated window at each place outside of them, or NONE, [places].
    """

    marked: Runs
    names: Ints

    @classmethod
    def of(cls, corpus: Corpus, frame: SchemaFrame | None, size: int, least: int) -> _Repeats:
        inside = _inside(corpus, frame)
        marked = find_marked(corpus, inside, least)
        for start, stop in zip(marked.starts, marked.stops, strict=True):
            inside[start:stop] = False
        return cls(marked, _names(corpus, inside, size, least))

    def held(self, size: int) -> int:
        """Return the most words that a schema would hold."""
        return _held(self.names, size) + int(self.marked.lengths[self.marked.ids].sum())


def _inside(corpus: Corpus, frame: SchemaFrame | None) -> Bools:
    """Return a mask of the places that may belong to a module."""
    if frame is None:
        return np.ones(len(corpus.words), np.bool_)
    inside = np.zeros(len(corpus.words), np.bool_)
    for prompt in np.flatnonzero(frame.prompts):
        inside[frame.open_places(corpus, int(prompt))] = True
    return inside


def _names(corpus: Corpus, inside: Bools, size: int, least: int) -> Ints:
    usable = np.concatenate((corpus.usable, [False]))  # the last element is for END
    words = np.where(inside & usable[corpus.words], corpus.words, np.int32(NONE))
    return repeated_windows(words, size, least, corpus.starts[corpus.first_turns[1:]])


def _frame_pays(corpus: Corpus, frame: SchemaFrame, repeats: _Repeats, size: int, least: int) -> bool:
    """Return True if the frame and the repeats behind it hold nine tenths of the words that modules alone would hold.

    Modules after a frame are encoded with the frame as context. But a frame leaves out prompts without it and the turns
    after its last one.
    """
    in_frame = int(frame.prompts.sum()) * frame.words(corpus)
    held = in_frame + repeats.held(size)
    words = int((corpus.words != END).sum())
    elsewhere = words - in_frame - int(_inside(corpus, frame).sum())
    if held >= NEARLY_ALL * (held + elsewhere):  # even if all the rest repeats
        return True
    return held >= NEARLY_ALL * _Repeats.of(corpus, None, size, least).held(size)


def _held(names: Ints, size: int) -> int:
    """Return the number of places in named windows."""
    places = np.flatnonzero(names != NONE)
    return int(np.minimum(np.diff(places), size).sum()) + (size if len(places) else 0)


def _prompts_of_runs(corpus: Corpus, runs: Runs) -> Longs:
    """Return the number of different prompts that hold each run."""
    prompts = corpus.prompts_of(runs.starts)
    pairs = np.unique(runs.ids.astype(np.int64) * len(corpus) + prompts)
    return np.bincount(pairs // max(len(corpus), 1), minlength=len(runs.lengths))
