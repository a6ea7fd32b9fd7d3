"""Windows and runs against brute force, on logs of few different words, where much repeats."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inlay.authoring.extract.runs import END, NONE, find_runs, repeated_windows

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines may be busy
ABOUT = {
    "prompts": st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=7),
    "size": st.integers(1, 7),
}
SETTINGS = {**ABOUT, "least": st.integers(2, 4)}


def laid_out(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The words of all prompts, and the place after each prompt."""
    words = np.array([word for prompt in prompts for word in (*prompt, END)], np.int32)
    return words, np.cumsum([len(prompt) + 1 for prompt in prompts])


def repeated(prompts: list[list[int]], size: int, least: int) -> dict[int, tuple[int, ...]]:
    """By place, the window that begins there, of those that stand in enough prompts."""
    windows, holders, start = {}, defaultdict(set), 0
    for number, prompt in enumerate(prompts):
        for first in range(len(prompt) - size + 1):
            window = tuple(prompt[first : first + size])
            windows[start + first] = window
            holders[window].add(number)
        start += len(prompt) + 1
    return {place: window for place, window in windows.items() if len(holders[window]) >= least}


@relaxed
@given(**SETTINGS)
def test_windows_are_named_exactly(prompts, size, least):
    words, ends = laid_out(prompts)
    names = repeated_windows(words, size, least, ends)
    expected = repeated(prompts, size, least)
    assert np.flatnonzero(names != NONE).tolist() == sorted(expected)
    by_name = {(int(names[place]), window) for place, window in expected.items()}
    assert len(by_name) == len({name for name, _ in by_name}) == len({window for _, window in by_name})


@relaxed
@given(prompts=st.lists(st.lists(st.integers(0, 200_000), max_size=12), min_size=2, max_size=4), size=st.integers(1, 5))
def test_windows_of_a_large_vocabulary(prompts, size):
    words, ends = laid_out(prompts + prompts)
    expected = repeated(prompts + prompts, size, 2)
    assert np.flatnonzero(repeated_windows(words, size, 2, ends) != NONE).tolist() == sorted(expected)


def aligned(windows: dict[int, tuple[int, ...]], size: int) -> dict[int, int]:
    """By place in a window, a number for all the places that stand alike in equal windows: by the definition."""
    parents = {place + offset: place + offset for place in windows for offset in range(size)}

    def root(place: int) -> int:
        while parents[place] != place:
            place = parents[place]
        return place

    for one, window in windows.items():
        for other in windows:
            if windows[other] == window:
                for offset in range(size):
                    parents[root(one + offset)] = root(other + offset)
    return {place: root(place) for place in parents}


@relaxed
@given(**SETTINGS)
def test_runs_are_aligned_sequences(prompts, size, least):
    words, ends = laid_out(prompts)
    groups = aligned(repeated(prompts, size, least), size)
    runs = find_runs(repeated_windows(words, size, least, ends), size)
    places = {}  # place → (run, offset)
    for start, run in zip(runs.starts.tolist(), runs.ids.tolist(), strict=True):
        for offset in range(int(runs.lengths[run])):
            assert start + offset not in places  # disjoint
            places[start + offset] = (run, offset)
    # exactly the repeated text is covered
    assert sorted(places) == sorted(groups)
    # a run stands whole wherever any part of it does, and is the same text there
    pairs = {(groups[place], places[place]) for place in places}
    assert len(pairs) == len({group for group, _ in pairs}) == len({part for _, part in pairs})
    assert len({(part, int(words[place])) for place, part in places.items()}) == len(pairs)
    assert_no_two_could_be_one(places, runs.lengths)


def assert_no_two_could_be_one(places: dict[int, tuple[int, int]], lengths: np.ndarray) -> None:
    """No run always stands before the same other run that always stands after it."""
    behind, before = defaultdict(set), defaultdict(set)
    for place, (run, offset) in places.items():
        if offset == 0:
            before[run].add(places.get(place - 1, (None, 0))[0])
        if offset == lengths[run] - 1:
            behind[run].add(places.get(place + 1, (None, 0))[0])
    for run, others in behind.items():
        for other in others - {None, run}:
            assert others != {other} or before[other] != {run}


@relaxed
@given(**SETTINGS)
def test_runs_are_maximal(prompts, size, least):
    """Where the same word stands beside every occurrence of a long run, that word is in a run with more occurrences."""
    words, ends = laid_out(prompts)
    runs = find_runs(repeated_windows(words, size, least, ends), size)
    counts = np.bincount(runs.ids)
    run_at = np.full(len(words), NONE)
    for start, stop, run in zip(runs.starts, runs.stops, runs.ids, strict=True):
        run_at[start:stop] = run
    for run in np.flatnonzero(runs.lengths[: len(counts)] >= size - 1):
        starts = runs.starts[runs.ids == run]
        for beside in (starts - 1, starts + runs.lengths[run]):
            if (beside >= 0).all() and len(set(words[beside])) == 1 and words[beside[0]] != END:
                neighbours = set(run_at[beside].tolist())
                assert len(neighbours) == 1
                assert NONE not in neighbours
                assert counts[neighbours.pop()] > counts[run] or run in run_at[beside]
