"""Runs of a workload through every column, in turns, and what came of them.

Each run has as many requests as its budget of time allows. What comes of it: when each token of each answer was there,
what that took of memory, and figures of it all.
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
    """One request's tokens. arrived, times: seconds of ``perf_counter``; one time a token.

    usage: where its prompt's keys and values came from; None where a column cannot tell.
    """

    arrived: float
    times: list[float] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    usage: Usage | None = None

    def say(self, ids: tuple[int, ...], now: float) -> None:
        """All its tokens so far. Those that are new came together."""
        self.times += [now] * (len(ids) - len(self.times))
        self.ids = ids


@dataclass
class Run:
    """One run of a workload.

    started: seconds of ``perf_counter``. prepare_s: what was computed before, once for all requests.
    kv_peak: the most bytes of KV that running requests held at once, shared ones counted once.
    pool_peak: the same with what the cache kept for later, and would give up for room.
    kv_peak, pool_peak, peak_batch: None where a column cannot tell. steps: inlay's forward passes.
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
        """From the start to the last token."""
        return max(answer.times[-1] for answer in self.answers) - self.started


class Limit:
    """So many seconds from now, behind which a run ends without a result."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.perf_counter() + seconds

    def left(self) -> float:
        """Seconds that are left of them; infinite where nothing was set."""
        return self._end - time.perf_counter()

    def check(self) -> None:
        """Raise DeadlineError when they are over."""
        if time.perf_counter() > self._end:
            raise self.passed()

    def passed(self) -> DeadlineError:
        """What ends a run that takes too long."""
        return DeadlineError(f"not done within {self._seconds:g} s; give a larger --budget-s or fewer --requests")


def figures(run: Run) -> dict[str, Any]:
    """A run as it stands in the JSON; latency is normalized: the mean over requests of their time by their tokens."""
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
    """Milliseconds of some seconds: the one in the middle, and those that 10 % and 1 % exceed."""
    values = np.percentile(np.asarray(seconds) * 1000, _PERCENTILES)
    return {f"p{q}": round(float(value), 3) for q, value in zip(_PERCENTILES, values, strict=True)}


def _hit_rate(run: Run) -> float | None:
    """The share of all prompts' tokens whose keys and values were stored."""
    used = [answer.usage for answer in run.answers if answer.usage is not None]
    if not used:
        return None
    return round(sum(usage.cached_tokens for usage in used) / sum(usage.prompt_tokens for usage in used), 4)


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
