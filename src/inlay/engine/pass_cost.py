"""The time of passes: the cost of tokens on this machine, and the number of prompt tokens within ``max_pass_s``.

When a model is loaded, the cost of prefill is measured for eviction by cost, and the cost of a pass by its rows for
speculation. To measure prefill, the same tokens run in a warm-up pass, in passes without context, and in passes with a
context. The context's KV is not computed, because its values do not affect the time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate, pairwise

from inlay.attention.plan import Part, Plan, build_plan, items_at
from inlay.engine.allocation import Work
from inlay.engine.runner import Runner
from inlay.kv.policies import PassCost
from inlay.kv.pool import KVPool
from inlay.models.spec import ModelSpec
from inlay.sampling.params import SamplingParams
from inlay.sampling.row import Row
from inlay.sampling.sampler import begin
from inlay.slots import SlotRange, cut

#: Minimum of prompt tokens per pass, so that every prompt advances.
FLOOR = 32
#: The kernels compute rows in groups of this size. A part of a group takes as long as a whole one.
GROUP = 16
#: A lone request's passes may take so many times ``max_pass_s``: over more rows, a row takes less time.
LONE = 4
#: Estimates are limited to this multiple of the measured tokens, because attention costs more per token in longer
#: passes.
_FURTHEST = 4
#: The weight of earlier passes in the measured time of a token.
_KEPT = 0.9


class PassBudget:
    """The prompt tokens of the next pass. ``max_s`` is the target duration in seconds; None for no limit.

    Deadlines, cancellations and shutdown take effect after the current pass, and a new request waits for it. The
    duration of a pass depends on model, machine and context, so every pass with prompt tokens is measured. While a
    request is alone, the target is ``LONE`` times as long.

    If u tokens took t seconds and T are allowed, u · T / t estimates the right number. A part of t is fixed: reading
    the weights, and the answers in the same pass. If t exceeds T, the estimate lies between the right number and u.
    If t is below T, it lies between u and the right number. So it improves with every pass. It also follows growing
    contexts and joining answers, without a model of either.
    """

    def __init__(self, max_s: float | None) -> None:
        self._max_s = max_s
        self._tokens = FLOOR  # current estimate for a pass of max_s seconds; may be less than a pass has
        self._recent_tokens = self._recent_s = 0.0

    @property
    def token_s(self) -> float | None:
        """The seconds that a prompt token takes, a moving mean over passes. None before the first pass."""
        return self._recent_s / self._recent_tokens if self._recent_tokens else None

    def tokens(self, most: int, *, lone: bool = False) -> int:
        """Return how many prompt tokens the next pass may have, at most ``most``. lone: for a request that is alone."""
        if self._max_s is None:
            return most
        return min(most, max(FLOOR, round(self._tokens * (LONE if lone else 1) / GROUP) * GROUP))

    def took(self, tokens: int, seconds: float, *, lone: bool = False) -> None:
        """Record the duration of a pass. ``tokens`` are its prompt tokens; passes without any are ignored."""
        if not tokens:
            return
        self._recent_tokens = _KEPT * self._recent_tokens + tokens
        self._recent_s = _KEPT * self._recent_s + seconds
        if self._max_s is None:
            return
        right = int(min(tokens * self._max_s / max(seconds, 1e-9), _FURTHEST * tokens))
        if seconds > self._max_s * (LONE if lone else 1):
            self._tokens = min(self._tokens, right)
        else:  # a short prompt is no reason to lower the estimate
            self._tokens = max(self._tokens, right)


_TOKENS = 64
_CONTEXT = 2048  # if pool and model allow it
_TIMES = 2  # runs per pass; the shortest counts, since other load only adds time


def measured_cost(
    spec: ModelSpec, runner: Runner, pool: KVPool, clock: Callable[[], float] = time.perf_counter
) -> PassCost:
    """Measure the cost of prefill. Overwrites KV in the pool.

    Args:
        spec: of the model.
        runner: runs the passes.
        pool: gives the slots.
        clock: returns seconds.

    Returns:
        The seconds per token, and per token that it attends to. The default if the pool is too small to measure.
    """
    context = min(_CONTEXT, pool.slots - _TOKENS - 2 * pool.chunk_size, spec.max_positions - _TOKENS)
    runs = pool.allocate(context + _TOKENS) if context >= _TOKENS else None
    if runs is None:
        return PassCost()
    before, own = cut(runs, 0, context), cut(runs, context, _TOKENS)
    ids = tuple(number % spec.vocab_size for number in range(_TOKENS))
    alone = Work(ids, Part.of(0, _TOKENS, (), own))
    behind = Work(ids, Part.of(context, _TOKENS, items_at(before, 0, 0), own))

    def seconds(work: Work) -> float:
        begun = clock()
        runner.run([work], [_TOKENS - 1]).float().sum().item()  # item() waits for the device
        return clock() - begun

    try:
        seconds(behind)
        first = min(seconds(alone) for _ in range(_TIMES))
        second = min(seconds(behind) for _ in range(_TIMES))
    finally:
        pool.free(runs)
    pair_s = max(0.0, second - first) / (_TOKENS * context)
    return PassCost(max(1e-9, first / _TOKENS - pair_s * _TOKENS / 2), pair_s)


_ROW_COUNTS = (1, 16, 4, 32, 8, 2, 64)  # the most useful ones first
_TABLE = 512  # times are kept up to this number of rows
_PARTS = 16  # requests of the timed plan
_ROWS_S = 0.3  # no further passes are begun after this many seconds
_ROUNDS = 6  # further runs per pass in that time; the shortest counts


class RowCost:
    """The time of a decode pass by its number of rows, behind a short context.

    Args:
        seconds: the measured times by number of rows, 1 among them. Times between are interpolated.
        plan_s: the seconds to make a new plan for a pass of one request.
        plan_more_s: the seconds for each further request of the plan.
    """

    def __init__(self, seconds: Mapping[int, float], plan_s: float = 0.0, plan_more_s: float = 0.0) -> None:
        assert 1 in seconds, "the time of one row is known"
        self._rows = sorted(seconds)
        self._seconds: list[float] = []
        for rows in self._rows:  # more rows never take less time; a lower time is an error of the measurement
            self._seconds.append(max(seconds[rows], *self._seconds[-1:], 1e-9))
        self._plan_s = plan_s
        self._plan_more_s = plan_more_s
        self._table = [self._interpolated(count) for count in range(_TABLE)]  # read many times a step
        steps = [behind - before for before, behind in pairwise(self._table)]
        self._least_steps = list(accumulate(reversed(steps), min))[::-1]

    def plan_s(self, requests: int) -> float:
        """Return the seconds to make a new plan for a pass of ``requests`` requests."""
        return self._plan_s + self._plan_more_s * (requests - 1)

    def seconds(self, rows: int) -> float:
        """Return the seconds of a pass of ``rows`` rows. Beyond the measured rows, the last slope continues."""
        return self._table[rows] if rows < _TABLE else self._interpolated(rows)

    def least_row_s(self, rows: int) -> float:
        """The least time that any further row of a pass of ``rows`` rows may take."""
        return self._least_steps[min(rows, _TABLE - 2)]

    def _interpolated(self, rows: int) -> float:
        """See ``seconds``."""
        known, place = self._rows, min(bisect_left(self._rows, rows), len(self._rows) - 1)
        if place == 0:
            return self._seconds[0]
        before, behind = known[place - 1], known[place]
        slope = (self._seconds[place] - self._seconds[place - 1]) / (behind - before)
        return self._seconds[place - 1] + slope * (rows - before)


def measured_rows(
    spec: ModelSpec, runner: Runner, pool: KVPool, clock: Callable[[], float] = time.perf_counter
) -> RowCost:
    """Measure passes of few rows, for about half a second. Overwrites KV in the pool.

    The times of one and of 16 rows are always measured, which takes longer for a large model. Without room in the pool,
    nothing is measured, and the time of a pass does not depend on its rows.

    Args:
        spec: of the model.
        runner: runs the passes.
        pool: gives the slots.
        clock: returns seconds.
    """
    most = min(max(_ROW_COUNTS), pool.slots, spec.max_positions)
    slots = pool.allocate(most)
    if slots is None:
        return RowCost({1: 1.0})
    ids = tuple(number % spec.vocab_size for number in range(most))
    row = Row(SamplingParams(), 0)
    found: dict[int, float] = {}

    @cache  # a plan is prepared in its first pass, which does not count
    def planned(rows: int) -> tuple[Work, Plan]:
        part = Part.of(0, rows, (), slots)
        return Work(ids[:rows], part), build_plan([part])

    def timed(rows: int) -> float:
        work, plan = planned(rows)
        since = clock()
        begin(runner.run([work], range(rows), plan), [row] * rows).wait()
        return clock() - since

    try:
        one, several = (_planning_s(runner, slots, parts, clock) for parts in (1, _PARTS))
        began = clock()
        for rows in _ROW_COUNTS:
            if rows <= most and (len(found) < 2 or clock() - began < _ROWS_S):
                timed(rows)  # allocates memory, and a device records the pass
                found[rows] = timed(rows)
        for _ in range(_ROUNDS):  # in turns, so that a busy moment does not make one number of rows slow
            found = {rows: min(known, timed(rows)) for rows, known in found.items()}
            if clock() - began > _ROWS_S:
                break
    finally:
        pool.free(slots)
    return RowCost(found, one, max(0.0, several - one) / (_PARTS - 1))


def _planning_s(runner: Runner, slots: tuple[SlotRange, ...], parts: int, clock: Callable[[], float]) -> float:
    """Return the seconds to plan a pass of ``parts`` requests with a row each."""
    own = cut(slots, 0, 1)
    times = []
    for _ in range(1 + _TIMES):
        since = clock()
        plan = build_plan([Part.of(number, 1, (), own) for number in range(parts)])
        runner.backend.prepare(plan)
        times.append(clock() - since)
    return min(times)
