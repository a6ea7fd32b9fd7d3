"""Turns repeated windows into runs: disjoint stretches of text, each of which occurs only as a whole.

Two places are *aligned* if equal windows begin at the same distance before them. Aligned words are equal, and aligned
places form groups. A run is a chain of groups that always follow each other. It ends where some prompt has another word
or no repeated text beside it. So overlapping and nested repeats are split where the set of places that share the text
changes. (These are the unitigs of a compacted de Bruijn graph, with words for bases.)

``join_runs`` then turns runs into candidates for modules. A single prompt with a truncated document splits that
document
into two runs for all prompts, but a module should be the whole document. So neighbours that nearly always occur
together
become one run. Places where only one of them occurs keep the rest of it. Runs that are too short for a module join a
neighbour, preferably on the same line: a heading that several documents share belongs to the text after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inlay.authoring.extract.corpus import NONE, Bools, Ints, Longs

TOGETHER = 0.9
MAX_ROUNDS = 200


@dataclass(frozen=True)
class Runs:
    """The occurrences of runs, in the order of their places. Runs do not overlap.

    Attributes:
        starts: The first place of each occurrence, [occurrences].
        ids: The run of each occurrence, [occurrences].
        lengths: Words of each run, [runs].
    """

    starts: Longs
    ids: Ints
    lengths: Longs

    @property
    def stops(self) -> Longs:
        """The place after each occurrence."""
        return self.starts + self.lengths[self.ids]

    def beside(self, others: Runs) -> Runs:
        """These and others, which do not overlap them and whose ids follow theirs."""
        starts = np.concatenate((self.starts, others.starts))
        ids = np.concatenate((self.ids, others.ids + np.int32(len(self.lengths))))
        order = np.argsort(starts, kind="stable")
        return Runs(starts[order], ids[order].astype(np.int32), np.concatenate((self.lengths, others.lengths)))

    def only(self, runs: Bools) -> Runs:
        """Return the occurrences of the selected runs. Ids stay the same."""
        kept = runs[self.ids]
        return Runs(self.starts[kept], self.ids[kept], self.lengths)


def find_runs(names: Ints, size: int) -> Runs:
    """Return the runs made of named windows of ``size`` words. Every place in a named window is in exactly one run.

    Args:
        names: Name of the window at each place, from ``repeated_windows``.
        size: Words of a window.
    """
    groups = _aligned(names, size)
    before = np.concatenate(([NONE], groups[:-1])).astype(np.int32)
    after = np.concatenate((groups[1:], [NONE])).astype(np.int32)
    begins = (groups != NONE) & _varies(groups, before)
    ends = (groups != NONE) & _varies(groups, after)
    # a link must hold from both sides
    begins[1:] |= ends[:-1] & (groups[1:] != NONE)
    ends[:-1] |= begins[1:] & (groups[:-1] != NONE)
    starts = np.flatnonzero(begins)
    heads, ids = np.unique(groups[starts], return_inverse=True)
    lengths = np.zeros(len(heads), np.int64)
    lengths[ids] = np.flatnonzero(ends) + 1 - starts
    return Runs(starts, ids.astype(np.int32), lengths)


def _aligned(names: Ints, size: int) -> Ints:
    """Return the group of aligned places for each place, or NONE outside of all named windows."""
    places = np.arange(len(names), dtype=np.int32)
    latest = np.maximum.accumulate(np.where(names != NONE, places, np.int32(-size)), dtype=np.int32)
    behind = places - latest  # distance from the latest named window
    example = np.zeros(int(names.max(initial=NONE)) + 1, np.int32)  # one place of each window
    example[names[names != NONE]] = np.flatnonzero(names != NONE)
    groups = np.full_like(names, NONE)
    inside = np.flatnonzero(behind < size)
    groups[inside] = example[names[latest[inside]]] + behind[inside]
    return _united(groups, _alignments(names, groups, example, size))


def _alignments(names: Ints, groups: Ints, example: Ints, size: int) -> Longs:
    """Return pairs of groups that are one, [pairs, 2].

    Only windows with different successors are examined. Where the same window always follows, its alignment gives the
    same pairs.
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
    """Merge the groups of each pair: connected components, by spreading the smallest label."""
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
    """Return, by place, True if the neighbours of its group's places are not all in one group."""
    kept = groups != NONE
    some = np.full(len(groups), NONE, np.int32)
    some[groups[kept]] = beside[kept]
    varies = np.zeros(len(groups), np.bool_)
    varies[groups[kept & ((beside != some[groups]) | (beside == NONE))]] = True
    return varies[groups]


@dataclass(frozen=True)
class _Joining:
    """The state of joining.

    Attributes:
        runs: The runs so far.
        claims: The most occurrences that a long part of each run had, 0 for a short run, [runs].
    """

    runs: Runs
    claims: Longs


def join_runs(runs: Runs, breaks: Bools, size: int, least: int) -> Runs:
    """Join neighbouring runs, pair by pair.

    Two short runs join if they meet at ``least`` places. Other pairs must meet at nine in ten places of either long
    run. A short run must also add more words than are lost at the other places.

    Args:
        runs: The runs to join.
        breaks: The word at each place holds a line break.
        size: A run of fewer words is short.
        least: The least number of places where two runs meet.
    """
    runs = _cut_at_breaks(runs, breaks, size)
    counts = np.bincount(runs.ids, minlength=len(runs.lengths))
    state = _Joining(runs, np.where(runs.lengths >= size, counts, 0))
    for _ in range(MAX_ROUNDS):
        chosen = _pairs(state, breaks, least)
        if not len(chosen):
            break
        state = _join(state, chosen, size)
    return state.runs


def _cut_at_breaks(runs: Runs, breaks: Bools, size: int) -> Runs:
    """Cut each short run in two after its last line break."""
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


def _pairs(state: _Joining, breaks: Bools, least: int) -> Longs:
    """Return the pairs to join now, [pairs, 3]: left, right, count. No run is left in one pair and right in another."""
    runs, known = state.runs, len(state.runs.lengths)
    meet = np.flatnonzero(_adjacent(runs))
    codes, one, counts = np.unique(_codes(runs)[meet], return_index=True, return_counts=True)
    left, right = codes // max(known, 1), codes % max(known, 1)
    fit = (left != right) & (counts >= least) & _pays(state, left, right, counts)
    pairs = np.stack((left, right, counts), axis=1)[fit]
    # long runs join short ones as long as that pays; then short runs join each other
    both_short = (state.claims[pairs[:, :2]] == 0).all(axis=1)
    pairs = pairs[np.lexsort((-pairs[:, 2], _seams(breaks, runs.starts[meet[one[fit]] + 1]), both_short))]
    # a run is only left or only right in a round, as in its first pair
    first = np.full((2, known), len(pairs))
    for side in (0, 1):
        np.minimum.at(first[side], pairs[:, side], np.arange(len(pairs)))
    is_left = first[0] < first[1]
    taken: Longs = pairs[is_left[pairs[:, 0]] & ~is_left[pairs[:, 1]]]
    return taken


def _seams(breaks: Bools, places: Longs) -> Longs:
    """Rate a border before these places: 0 within a line, 1 before a line break, 2 after one.

    Pairs with a poorly placed border join first.
    """
    return np.where(breaks[places], np.int64(1), np.where(breaks[places - 1], np.int64(2), np.int64(0)))


def _pays(state: _Joining, left: Longs, right: Longs, counts: Longs) -> Bools:
    """Return True for each pair of runs that should join. ``counts`` are their meetings."""
    lengths = state.runs.lengths
    lost = [np.maximum(state.claims[side] - counts, 0) for side in (left, right)]
    together = counts >= TOGETHER * np.maximum(state.claims[left], state.claims[right])
    short_left, short_right = (state.claims[side] == 0 for side in (left, right))
    gains_left = ~short_left | short_right | (counts * lengths[left] >= lost[1] * lengths[right])
    gains_right = ~short_right | short_left | (counts * lengths[right] >= lost[0] * lengths[left])
    pays: Bools = together & gains_left & gains_right
    return pays


def _adjacent(runs: Runs) -> Bools:
    """Return, by occurrence, True if the next one begins at its end."""
    return np.concatenate((runs.stops[:-1] == runs.starts[1:], [False]))[: len(runs.starts)]


def _codes(runs: Runs) -> Longs:
    """Return, by occurrence, a number for the pair of it and the next one."""
    following = np.concatenate((runs.ids[1:], [0]))[: len(runs.ids)]
    return runs.ids.astype(np.int64) * len(runs.lengths) + following


def _join(state: _Joining, pairs: Longs, size: int) -> _Joining:
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
    return _Joining(Runs(runs.starts[kept], ids[kept], lengths), np.concatenate((state.claims, claims)))
