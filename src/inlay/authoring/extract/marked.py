"""Parts of messages that requests marked with ``cache_control``, as runs: a mark says where a module ends.

A part that repeats is one run, whole, also where another prompt holds the same text without a mark.
"""

from __future__ import annotations

import numpy as np

from inlay.authoring.extract.corpus import Bools, Corpus, Ints, Longs
from inlay.authoring.extract.runs import Runs

_BEGINNING = 8  # words that are compared before the whole text is


def find_marked(corpus: Corpus, inside: Bools, least: int) -> Runs:
    """The marked texts that at least ``least`` different prompts hold.

    inside: by place, whether a module may stand there. A text that holds what a schema cannot is left out. Where texts
    overlap, the marked one counts, or else the first.
    """
    usable = inside & np.concatenate((corpus.usable, [False]))[corpus.words]  # the last one is for END
    texts: dict[bytes, list[int]] = {}  # where each is marked
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
    """The places where these words stand, marked or not. order, in_order: the places of all words, by their number."""
    places = order[slice(*np.searchsorted(in_order, [text[0], text[0] + 1]))]
    places = places[places + len(text) <= len(words)]
    for number in range(1, min(len(text), _BEGINNING)):
        places = places[words[places + number] == text[number]]
    return [int(place) for place in places if np.array_equal(words[place : place + len(text)], text)]
