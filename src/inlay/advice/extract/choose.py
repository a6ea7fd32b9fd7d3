"""Which runs become modules, and where in each prompt they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.advice.extract.corpus import Corpus, Ints, Longs
from inlay.advice.extract.find import Found
from inlay.advice.extract.runs import Runs
from inlay.pml.nodes import MAX_BYTES

Encode = Callable[[Sequence[str]], list[Sequence[int]]]
"""Texts → token ids, each text alone."""

ROOM = MAX_BYTES * 9 // 10  # the rest is for tags and for what this estimate misses


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that becomes a module. tokens: its length. prompts: how many different ones hold it."""

    text: str
    tokens: int
    prompts: int

    @property
    def worth(self) -> int:
        """The tokens that need not be computed if each prompt but the first reads it from the cache."""
        return self.tokens * (self.prompts - 1)


@dataclass(frozen=True)
class Cover:
    """Where pieces stand in the log, in the order of the places; each piece once in a prompt.

    starts, stops, pieces: (occurrences,).
    bounds: (prompts + 1,) prompt p has the occurrences bounds[p] … bounds[p + 1] - 1.
    """

    starts: Longs
    stops: Longs
    pieces: Ints
    bounds: Longs

    def of(self, prompt: int) -> slice:
        """The occurrences in a prompt."""
        return slice(int(self.bounds[prompt]), int(self.bounds[prompt + 1]))


@dataclass(frozen=True)
class Choice:
    """pieces: those that become modules, the most worth first. left_out: those that were too many."""

    pieces: tuple[Piece, ...]
    cover: Cover
    left_out: tuple[Piece, ...]


def choose(corpus: Corpus, found: Found, encode: Encode, *, min_tokens: int, max_modules: int) -> Choice:
    """The runs of at least ``min_tokens`` tokens, as many as are allowed and as a schema can hold."""
    runs = found.runs
    first = np.sort(np.unique(runs.ids, return_index=True)[1])
    ids = runs.ids[first]
    texts = corpus.spans(runs.starts[first], runs.stops[first])
    tokens = [len(encoded) for encoded in encode(texts)]
    pieces = [Piece(*values) for values in zip(texts, tokens, found.prompts[ids].tolist(), strict=True)]
    long = [index for index, piece in enumerate(pieces) if piece.tokens >= min_tokens]
    ranked = sorted(long, key=lambda index: -pieces[index].worth)  # of equal worth, the first in the log
    taken = _fitting([pieces[index].text for index in ranked], max_modules)
    chosen = [index for index, fits in zip(ranked, taken, strict=True) if fits]
    left_out = [index for index, fits in zip(ranked, taken, strict=True) if not fits]
    return Choice(
        pieces=tuple(pieces[index] for index in chosen),
        cover=_cover(corpus, runs, ids[chosen]),
        left_out=tuple(pieces[index] for index in left_out),
    )


def _fitting(texts: list[str], most: int) -> list[bool]:
    """Which of the texts go into one schema: the first ones, without those that would make its file too large."""
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
    """An upper bound of the bytes that a schema takes for a text, with what is escaped and with indentation."""
    return len(text.encode()) + sum(
        text.count(one) * cost for one, cost in {"&": 5, "<": 4, ">": 4, "\r": 5, "\n": 8}.items()
    )


def _cover(corpus: Corpus, runs: Runs, ids: Ints) -> Cover:
    piece_of = np.full(len(runs.lengths), -1, np.int32)
    piece_of[ids] = np.arange(len(ids), dtype=np.int32)
    kept = np.flatnonzero(piece_of[runs.ids] >= 0)
    pieces = piece_of[runs.ids[kept]]
    prompts = corpus.prompts_of(runs.starts[kept])
    # a prompt imports a module once: where it stands first
    first = np.sort(np.unique(prompts * (len(ids) + 1) + pieces, return_index=True)[1])
    kept = kept[first]
    bounds = np.searchsorted(prompts[first], np.arange(len(corpus) + 1))
    return Cover(runs.starts[kept], runs.stops[kept], pieces[first], bounds)
