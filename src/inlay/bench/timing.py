"""Timing things turn by turn, so that a slow moment of the machine meets all of them; medians are reported."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Runs something once and returns the seconds that count.
Meter = Callable[[], float]

#: Called with how much is done and how much there is to do.
Progress = Callable[[int, int], None]

_ONCE_S = 10.0  # what takes longer runs once
_HALF_S = 1.0  # what takes longer runs half as often: it averages over much already
_ENOUGH_S, _MOST = 0.25, 40  # short ones run more often, until a turn of all takes this long together, or this often


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of several runs, and the fastest of them, which a busy machine disturbs least."""

    seconds: float
    fastest: float
    runs: int

    @property
    def ms(self) -> float:
        return self.seconds * 1000


def clocked(call: Callable[[], object], before: Callable[[], object] | None = None) -> Meter:
    """A meter of a whole call. before: what is done first each time and does not count."""

    def meter() -> float:
        if before is not None:
            before()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return meter


def in_turns(meters: Mapping[str, Meter], runs: int, progress: Progress | None = None) -> dict[str, Timing]:
    """Run each meter in turns, ``runs`` times and more where they are short, and give medians.

    Every turn has an order of its own, since what ran before leaves caches and threads behind in some state. A first
    turn warms up and does not count, except for what took more than ten seconds: that is not repeated.
    progress: called with the number of turns done and to do.
    """
    first = {name: meter() for name, meter in meters.items()}
    samples: dict[str, list[float]] = {name: [] for name in meters}
    repeats = min(_MOST, int(_ENOUGH_S / max(sum(first.values()), 1e-9)))
    wanted = {name: max(repeats, _runs(seconds, runs)) for name, seconds in first.items()}
    turns, order, shuffle = max(wanted.values()), list(meters), random.Random(0).shuffle
    for turn in range(turns):
        if progress is not None:
            progress(turn + 1, turns + 1)
        shuffle(order)
        for name in order:
            if turn < wanted[name]:
                samples[name].append(meters[name]())
    return {name: _timing(took or [first[name]]) for name, took in samples.items()}


def _timing(took: list[float]) -> Timing:
    return Timing(statistics.median(took), min(took), len(took))


def _runs(first: float, runs: int) -> int:
    if first > _ONCE_S:
        return 0
    return (runs + 1) // 2 if first > _HALF_S else runs
