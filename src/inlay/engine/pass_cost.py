"""The time of passes: the cost of prefill on this machine, and the number of prompt tokens within ``max_pass_s``.

The cost is measured when a model is loaded, for eviction by cost. The same tokens run in a warm-up pass, in passes
without context, and in passes with a context. The context's KV is not computed, because its values do not affect the
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from inlay.attention.plan import Part, items_at
from inlay.engine.allocation import Work
from inlay.engine.runner import Runner
from inlay.kv.policies import PassCost
from inlay.kv.pool import KVPool
from inlay.models.spec import ModelSpec
from inlay.slots import cut

#: Minimum of prompt tokens per pass, so that every prompt advances.
FLOOR = 32
#: Estimates are limited to this multiple of the measured tokens, because attention costs more per token in longer
#: passes.
_FURTHEST = 4
#: The weight of earlier passes in the measured time of a token.
_KEPT = 0.9


class PassBudget:
    """The prompt tokens of the next pass. ``max_s`` is the target duration in seconds; None for no limit.

    Deadlines, cancellations and shutdown take effect after the current pass. The duration of a pass depends on model,
    machine and context, so every pass with prompt tokens is measured.

    If u tokens took t seconds and T are allowed, u · T / t estimates the right number. A part of t is fixed: reading
    the weights, and the answers in the same pass. If t exceeds T, the estimate lies between the right number and u.
    If t is below T, it lies between u and the right number. So it improves with every pass. It also follows growing
    contexts and joining answers, without a model of either.
    """

    def __init__(self, max_s: float | None) -> None:
        self._max_s = max_s
        self._tokens = FLOOR  # current estimate for a pass of max_s seconds
        self._recent_tokens = self._recent_s = 0.0

    @property
    def token_s(self) -> float | None:
        """The seconds that a prompt token takes, a moving mean over passes. None before the first pass."""
        return self._recent_s / self._recent_tokens if self._recent_tokens else None

    def tokens(self, most: int) -> int:
        """How many prompt tokens the next pass may have, and at most ``most``."""
        return most if self._max_s is None else min(most, self._tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass. ``tokens`` are its prompt tokens; passes without any are ignored."""
        if not tokens:
            return
        self._recent_tokens = _KEPT * self._recent_tokens + tokens
        self._recent_s = _KEPT * self._recent_s + seconds
        if self._max_s is None:
            return
        right = int(min(tokens * self._max_s / max(seconds, 1e-9), _FURTHEST * tokens))
        if seconds > self._max_s:
            self._tokens = max(FLOOR, min(self._tokens, right))
        else:  # a short prompt is no reason to lower the estimate
            self._tokens = max(self._tokens, right)


_TOKENS = 64
_CONTEXT = 2048  # if pool and model allow it
_TIMES = 2  # runs per pass; the shortest counts, since other load only adds time


def measured_cost(
    spec: ModelSpec, runner: Runner, pool: KVPool, clock: Callable[[], float] = time.perf_counter
) -> PassCost:
    """Measure the cost of a token, and of each token that it attends to. Overwrites KV in the pool.

    Returns the default if the pool is too small to measure. ``clock`` returns seconds.
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
