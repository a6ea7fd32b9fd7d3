"""From repeated windows to runs: disjoint stretches of text, each of which stands whole wherever any part of it does.

Two places are *aligned* if equal windows begin at the same distance before them; words that are aligned are the same
word, and aligned places form groups. A run is a chain of groups that always follow each other: it ends where, in some
prompt, another word or no repeated text stands beside it. So overlapping and nested repeats are split exactly where the
set of places that share the text changes. (These are the unitigs of a compacted de Bruijn graph, with words for bases.)

What a cache of exact prefixes would save on a log: the usual way, to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inlay.advice.extract.corpus import NONE, Bools, Ints, Longs


@dataclass(frozen=True)
class Runs:
    """Where which run stands, in the order of the places. Runs do not overlap.

    starts, ids: (occurrences,) the first place of each occurrence, and which run it is.
    lengths: (runs,) in words.
    """

    starts: Longs
    ids: Ints
    lengths: Longs

    @property
    def stops(self) -> Longs:
        """The place behind each occurrence."""
        return self.starts + self.lengths[self.ids]

    def only(self, runs: Bools) -> Runs:
        """The occurrences of these runs alone, with the ids as they are."""
        kept = runs[self.ids]
        return Runs(self.starts[kept], self.ids[kept], self.lengths)


def find_runs(names: Ints, size: int) -> Runs:
    """The runs made of named windows of ``size`` words. names: by place, as ``repeated_windows`` gives them.

    Every place in a named window is in exactly one run.
    """
    groups = _aligned(names, size)
    before = np.concatenate(([NONE], groups[:-1])).astype(np.int32)
    after = np.concatenate((groups[1:], [NONE])).astype(np.int32)
    begins = (groups != NONE) & _varies(groups, before)
    ends = (groups != NONE) & _varies(groups, after)
    # a link holds if it holds from both sides
    begins[1:] |= ends[:-1] & (groups[1:] != NONE)
    ends[:-1] |= begins[1:] & (groups[:-1] != NONE)
    starts = np.flatnonzero(begins)
    heads, ids = np.unique(groups[starts], return_inverse=True)
    lengths = np.zeros(len(heads), np.int64)
    lengths[ids] = np.flatnonzero(ends) + 1 - starts
    return Runs(starts, ids.astype(np.int32), lengths)


def _aligned(names: Ints, size: int) -> Ints:
    """By place, the group of aligned places that it is in, or NONE outside of all named windows."""
    places = np.arange(len(names), dtype=np.int32)
    latest = np.maximum.accumulate(np.where(names != NONE, places, np.int32(-size)), dtype=np.int32)
    behind = places - latest  # the distance from the latest named window that has begun
    example = np.zeros(int(names.max(initial=NONE)) + 1, np.int32)  # one place of each window
    example[names[names != NONE]] = np.flatnonzero(names != NONE)
    groups = np.full_like(names, NONE)
    inside = np.flatnonzero(behind < size)
    groups[inside] = example[names[latest[inside]]] + behind[inside]
    return _united(groups, _alignments(names, groups, example, size))


def _alignments(names: Ints, groups: Ints, example: Ints, size: int) -> Longs:
    """Pairs of groups that are one, (pairs, 2): known from windows that do not go on in the same way everywhere.

    Where the same window always follows, the alignment of its places says the same.
    """
    branching = np.zeros(len(example), np.bool_)
    named = np.flatnonzero(names != NONE)
    found, following = names[named], names[named + 1]  # the last place is never named
    some = np.zeros(len(example), np.int32)
    some[found] = following
    branching[found[(following != some[found]) | (following == NONE)]] = True
    places = named[branching[found]]
    examples = example[names[places]]
    codes = [np.zeros(0, np.int64)]
    for shift in range(1, size):
        here, there = groups[places + shift], groups[examples + shift]
        differ = here != there
        if differ.any():
            codes.append(np.unique(here[differ].astype(np.int64) * len(names) + there[differ]))
    return np.stack(np.divmod(np.unique(np.concatenate(codes)), len(names)), axis=1)


def _united(groups: Ints, pairs: Longs) -> Ints:
    """The groups, with those in a pair made one (connected components, by spreading the smallest label)."""
    if not len(pairs):
        return groups
    labels, ends = np.unique(pairs, return_inverse=True)
    one, other = ends.reshape(pairs.shape).T
    parents = np.arange(len(labels))
    while True:
        low, high = np.minimum(parents[one], parents[other]), np.maximum(parents[one], parents[other])
        if (low == high).all():
            break
        np.minimum.at(parents, high, low)
        parents = _roots(parents)
    table = np.arange(len(groups), dtype=np.int32)
    table[labels] = labels[parents]
    united = table[groups]
    united[groups == NONE] = NONE
    return united


def _roots(parents: Longs) -> Longs:
    while not np.array_equal(shorter := parents[parents], parents):
        parents = shorter
    return parents


def _varies(groups: Ints, beside: Ints) -> Bools:
    """By place, whether what stands beside the places of its group is not the same group everywhere, or none."""
    kept = groups != NONE
    some = np.full(len(groups), NONE, np.int32)
    some[groups[kept]] = beside[kept]
    varies = np.zeros(len(groups), np.bool_)
    varies[groups[kept & ((beside != some[groups]) | (beside == NONE))]] = True
    return varies[groups]


ELEMENT = np.dtype(">u4")
"""An element of a sequence, in bytes: the highest byte first, so that bytes sort as elements do."""


def shared_prefixes(sequences: Sequence[bytes]) -> list[int]:
    """For each sequence, how many elements it has in common, from its start, with the best of those before it.

    This is a prefix cache that is never full and finds every single element (those of real servers work in blocks).
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    left: dict[int, int | None] = dict(zip(order, [None, *order], strict=False))
    right: dict[int, int | None] = dict(zip(order, [*order[1:], None], strict=False))
    common = {one: _common(sequences[other], sequences[one]) for one, other in zip(order[1:], order, strict=False)}
    shared = [0] * len(sequences)
    # taken out from the last to the first, each finds only earlier ones beside it; the nearest has most in common
    for one in reversed(range(len(sequences))):
        lower, upper = left[one], right[one]
        to_lower = common.get(one, 0) if lower is not None else 0
        to_upper = common.get(upper, 0) if upper is not None else 0
        shared[one] = max(to_lower, to_upper)
        if upper is not None:
            left[upper] = lower
            common[upper] = min(to_lower, to_upper)
        if lower is not None:
            right[lower] = upper
    return shared


def _common(one: bytes, other: bytes) -> int:
    """How many elements two sequences begin with in common."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one[:size], ELEMENT) != np.frombuffer(other[:size], ELEMENT)
    return int(differ.argmax()) if differ.any() else size // ELEMENT.itemsize
