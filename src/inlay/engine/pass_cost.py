"""Measures the cost of prefill on this machine when a model is loaded, for eviction by cost.

The same tokens run in a warm-up pass, in passes without context, and in passes with a context. The context's KV is not
computed, because its values do not affect the time.
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
