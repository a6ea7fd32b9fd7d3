"""Chooses the runs that become modules, and finds their places in each prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.authoring.extract.corpus import Corpus, Ints, Longs
from inlay.authoring.extract.find import Found
from inlay.authoring.extract.runs import Runs
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
