"""What came of a run: when each token of each answer was there, what that took of memory, and figures of it all."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inlay.bench.throughput.steps import Step
from inlay.errors import DeadlineError
from inlay.types import Usage

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
