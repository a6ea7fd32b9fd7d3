"""Running a workload through every column in turns, each with as many requests as its budget of time allows."""

from __future__ import annotations

import random
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from inlay.bench.throughput.record import Run
from inlay.bench.throughput.workload import Workload
from inlay.errors import DeadlineError, ModelError


class Column(Protocol):
    """Runs a workload. Raises ModelError where it cannot, DeadlineError where it takes longer than ``limit_s``."""

    def prompt_tokens(self, workload: Workload) -> int:
        """How many tokens of prompts it computes in a run."""
        ...

    def run(self, workload: Workload, limit_s: float) -> Run: ...


@dataclass(frozen=True)
class Pace:
    """What a small run says of a large one: seconds of a prompt's token, and of a step of ``rows`` answers."""

    token_s: float
    step_s: float
    rows: int

    @classmethod
    def of(cls, run: Run, prompt_tokens: int) -> Pace:
        """The pace of a run that computed that many tokens of prompts."""
        first = max(answer.times[0] for answer in run.answers) - run.started
        steps = [(answer.times[-1] - answer.times[0]) / max(1, len(answer.times) - 1) for answer in run.answers]
        return cls(first / prompt_tokens, min(steps), len(run.answers))

    def seconds(self, workload: Workload, prompt_tokens: int, batch: int) -> float:
        """The most that a workload should take. A step is taken to be as long as its rows are many, which it rarely is.

        prompt_tokens: those that are computed. batch: the most requests that run at once.
        """
        requests = len(workload.asks)
        rows = min(requests, workload.clients or batch)
        steps = -(-requests // rows) * (workload.completion - 1)
        answering = steps * self.step_s * max(1.0, rows / self.rows)
        return max(prompt_tokens * self.token_s + answering, workload.asks[-1].at)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much is run.

    turns: runs of each column. batch: the most requests that run at once. budget_s, limit_s: see ThroughputSetting.
    """

    turns: int
    batch: int
    budget_s: float
    limit_s: float


def pace_of(column: Column, workload: Workload, limit_s: float) -> Pace | str:
    """Warm a column up with a small run; returns the pace of that, or why it cannot run."""
    small = workload.small()
    try:
        return Pace.of(column.run(small, limit_s), column.prompt_tokens(small))
    except (ModelError, DeadlineError) as error:
        return str(error)


def affordable(column: Column, workload: Workload, pace: Pace, bounds: Bounds) -> Workload:
    """The workload, or as many of its first requests as fit the budget, at least one."""

    def seconds(requests: int) -> float:
        fewer = workload.first(requests)
        return pace.seconds(fewer, column.prompt_tokens(fewer), bounds.batch)

    more = range(2, len(workload.asks) + 1)
    return workload.first(1 + bisect_right(more, bounds.budget_s, key=seconds))


def in_turns(
    columns: Mapping[str, Column], workload: Workload, paces: Mapping[str, Pace | str], bounds: Bounds
) -> Iterator[tuple[str, Run | str]]:
    """Each column with its run of median time as soon as that is known, or with why it could not run.

    Every turn has an order of its own, since what ran before leaves caches and threads behind in some state.
    """
    runs: dict[str, list[Run]] = {}
    for name in columns:
        pace = paces[name]
        if isinstance(pace, str):
            yield name, pace
        else:
            runs[name] = []
    shuffle = random.Random(0).shuffle
    for turn in range(bounds.turns):
        order = list(runs)
        shuffle(order)
        for name in order:
            pace = paces[name]
            assert isinstance(pace, Pace), "a column without a pace has been left out"
            try:
                runs[name].append(columns[name].run(affordable(columns[name], workload, pace, bounds), bounds.limit_s))
            except (ModelError, DeadlineError) as error:
                del runs[name]
                yield name, str(error)
                continue
            if turn == bounds.turns - 1:
                yield name, _median(runs[name])


def _median(runs: list[Run]) -> Run:
    middle = statistics.median_low(run.wall_s for run in runs)
    return next(run for run in runs if run.wall_s == middle)
