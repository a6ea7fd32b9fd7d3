"""Runs of a workload through every column, in turns, and their figures.

Each run has as many requests as its time budget allows. A run records the time of every token and the memory in use.
"""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from inlay.errors import DeadlineError, ModelError
from inlay.types import Usage
from inlay_lab.bench.throughput.steps import Step
from inlay_lab.bench.throughput.workload import Workload

_PERCENTILES = (50, 90, 99)


@dataclass
class Answer:
    """One request's tokens.

    Attributes:
        arrived: In seconds of ``perf_counter``.
        times: The time of each token, in the same clock.
        usage: The sources of its prompt's KV; None if the column does not report it.
    """

    arrived: float
    times: list[float] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    usage: Usage | None = None

    def say(self, ids: tuple[int, ...], now: float) -> None:
        """Record all tokens so far. New ones get the time ``now``."""
        self.times += [now] * (len(ids) - len(self.times))
        self.ids = ids


@dataclass
class Run:
    """One run of a workload. A peak is None if the column does not report it.

    Attributes:
        started: In seconds of ``perf_counter``.
        prepare_s: Seconds of the preparation, once for all requests.
        kv_peak: Most bytes of KV referenced by running requests at once; shared ones count once.
        pool_peak: As kv_peak, plus evictable cached KV.
        steps: inlay's forward passes.
    """

    started: float
    answers: list[Answer]
    prepare_s: float = 0.0
    kv_peak: int | None = None
    pool_peak: int | None = None
    peak_batch: int | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last token."""
        return max(answer.times[-1] for answer in self.answers) - self.started


class Limit:
    """A time limit, counted from its creation."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.perf_counter() + seconds

    def left(self) -> float:
        """The remaining seconds; infinite without a limit."""
        return self._end - time.perf_counter()

    def check(self) -> None:
        """Raise DeadlineError after the limit."""
        if time.perf_counter() > self._end:
            raise self.passed()

    def passed(self) -> DeadlineError:
        """The error for a run that takes too long."""
        return DeadlineError(f"not done within {self._seconds:g} s; give a larger --budget-s or fewer --requests")


def figures(run: Run) -> dict[str, Any]:
    """A run's figures for the JSON. Latency is normalized: the mean over requests of their time per token."""
    tokens = sum(len(answer.times) for answer in run.answers)
    latency = [(answer.times[-1] - answer.arrived) / len(answer.times) for answer in run.answers]
    first = [answer.times[0] - answer.arrived for answer in run.answers]
    between = np.concatenate([np.diff(answer.times) for answer in run.answers])
    return {
        "wall_s": round(run.wall_s, 4),
        "prepare_s": round(run.prepare_s, 4),
        "tokens_s": round(tokens / run.wall_s, 2),
        "requests_s": round(len(run.answers) / run.wall_s, 4),
        "latency_ms_per_token": round(float(np.mean(latency)) * 1000, 3),
        "ttft_ms": percentiles(first),
        "inter_token_ms": percentiles(between) if len(between) else None,
        "requests": len(run.answers),
        "hit_rate": _hit_rate(run),
        "kv_peak_bytes": run.kv_peak,
        "pool_peak_bytes": run.pool_peak,
        "peak_batch": run.peak_batch,
    }


def percentiles(seconds: Any) -> dict[str, float]:
    """The 50th, 90th and 99th percentile of some seconds, in milliseconds."""
    values = np.percentile(np.asarray(seconds) * 1000, _PERCENTILES)
    return {f"p{q}": round(float(value), 3) for q, value in zip(_PERCENTILES, values, strict=True)}


def _hit_rate(run: Run) -> float | None:
    """The share of all prompt tokens with stored keys and values."""
    used = [answer.usage for answer in run.answers if answer.usage is not None]
    if not used:
        return None
    return round(sum(usage.cached_tokens for usage in used) / sum(usage.prompt_tokens for usage in used), 4)


class Column(Protocol):
    """Runs a workload. Raises ModelError if it cannot, DeadlineError after ``limit_s``."""

    def prompt_tokens(self, workload: Workload) -> int:
        """Number of prompt tokens that a run computes."""
        ...

    def run(self, workload: Workload, limit_s: float) -> Run: ...


@dataclass(frozen=True)
class Pace:
    """Estimates from a small run: seconds of a prompt's token, and of a step of ``rows`` answers."""

    token_s: float
    step_s: float
    rows: int

    @classmethod
    def of(cls, run: Run, prompt_tokens: int) -> Pace:
        """The pace of a run that computed ``prompt_tokens`` prompt tokens."""
        first = max(answer.times[0] for answer in run.answers) - run.started
        steps = [(answer.times[-1] - answer.times[0]) / max(1, len(answer.times) - 1) for answer in run.answers]
        return cls(first / prompt_tokens, min(steps), len(run.answers))

    def seconds(self, workload: Workload, prompt_tokens: int, batch: int) -> float:
        """An upper estimate of a workload's seconds. It assumes that a step's time is proportional to its rows.

        Args:
            prompt_tokens: Computed prompt tokens.
            batch: Most requests that run at once.
        """
        requests = len(workload.asks)
        rows = min(requests, workload.clients or batch)
        steps = -(-requests // rows) * (workload.completion - 1)
        answering = steps * self.step_s * max(1.0, rows / self.rows)
        return max(prompt_tokens * self.token_s + answering, workload.asks[-1].at)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of the runs.

    Attributes:
        turns: Runs of each column.
        batch: Most requests that run at once.
        budget_s, limit_s: See ThroughputSetting.
    """

    turns: int
    batch: int
    budget_s: float
    limit_s: float


def pace_of(column: Column, workload: Workload, limit_s: float) -> Pace | str:
    """Warm a column up with a small run; returns its pace, or the reason that it cannot run."""
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
    """Yield each column with its run of median time, or with the reason that it could not run.

    Every turn has its own order, because earlier work leaves caches and threads in some state.
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
