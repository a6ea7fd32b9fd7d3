"""Which windows of a fixed number of words occur again: exactly, without a hash.

Windows are named by doubling (Karp, Miller, Rosenberg 1972): words have numbers; a window of 2 n words is named by the
pair of names of its halves, and equal pairs are found by sorting. Equal names mean equal words. A window that occurs
too seldom loses its name, and so do all that hold it, which keeps the arrays short where little repeats.
"""

from __future__ import annotations

import numpy as np

from inlay.extract.corpus import Ints, Longs

NONE = -1
"""No name: the window here occurs too seldom, holds a word that may not be used, or crosses the end of a turn."""


def repeated_windows(words: Ints, size: int, least: int, prompt_ends: Longs) -> Ints:
    """By place, the name of the window of ``size`` words that begins there, or NONE.

    words: numbers of words, and NONE where none may be used; the last one is NONE.
    least: how many different prompts must hold a window for it to have a name.
    prompt_ends: (prompts,) the place behind each prompt.
    Names are 0, 1, 2, …; two places have the same name if and only if the same words follow them.
    """
    names, length = _renamed(words, _often(words, least)), 1
    while length < size:
        bits = max(int(names.max(initial=0)).bit_length(), 1)
        # as many shorter windows side by side as fit into one 64-bit key; the last two may overlap
        many = min(64 // bits, -(-size // length))
        shifts = [min(number * length, size - length) for number in range(many)]
        names = _joined(names, shifts, bits, least)
        length = shifts[-1] + length
    return _in_prompts(names, least, prompt_ends)


def _often(names: Ints, least: int) -> Longs:
    """How often each name occurs, and 0 for those that occur less than ``least`` times."""
    counts = np.bincount(names[names != NONE])
    counts[counts < least] = 0
    return counts


def _renamed(names: Ints, counts: Longs) -> Ints:
    """The names whose count is not 0 as 0, 1, 2, …; NONE for the others."""
    fresh = np.full(len(counts) + 1, NONE, np.int32)  # the last one is for NONE itself
    kept = np.flatnonzero(counts)
    fresh[kept] = np.arange(len(kept), dtype=np.int32)
    return fresh[names]


def _joined(names: Ints, shifts: list[int], bits: int, least: int) -> Ints:
    """Names for the windows that are made of the windows at these shifts, which are named already."""
    joined = np.full_like(names, NONE)
    room = len(names) - shifts[-1]
    if room <= 0:
        return joined
    whole = names[:room] != NONE
    for shift in shifts[1:]:
        whole &= names[shift : shift + room] != NONE
    places = np.flatnonzero(whole)
    keys = np.zeros(len(places), np.uint64)
    for shift in shifts:
        keys = (keys << np.uint64(bits)) | names[places + shift].astype(np.uint64)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    group = np.cumsum(first) - 1
    often = np.bincount(group) >= least
    fresh = np.where(often, np.cumsum(often) - 1, NONE).astype(np.int32)
    joined[places[order]] = fresh[group]
    return joined


def _in_prompts(names: Ints, least: int, prompt_ends: Longs) -> Ints:
    """Keep the names of windows that stand in at least this many different prompts."""
    places = np.flatnonzero(names != NONE)
    order = np.argsort(names[places], kind="stable")  # so that the prompts of one name rise
    places = places[order]
    found, prompts = names[places], np.searchsorted(prompt_ends, places, side="right")
    fresh = np.concatenate(([True], (found[1:] != found[:-1]) | (prompts[1:] != prompts[:-1])))[: len(found)]
    counts = np.bincount(found[fresh], minlength=int(names.max(initial=NONE)) + 1)
    counts[counts < least] = 0
    return _renamed(names, counts)
