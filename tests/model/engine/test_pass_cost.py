"""The cost of prefill, as measured when a model is loaded."""

from __future__ import annotations

import pytest

from inlay import LLM
from inlay.attention.registry import get_backend
from inlay.engine.pass_cost import measured_cost
from inlay.engine.runner import Runner
from inlay.kv.policies import PassCost
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from tests.conftest import tiny


class Passes:
    """A clock by which a pass takes 3 ms a token, and 2 µs for each token that one attends to; the first one longer."""

    def __init__(self, runner: Runner) -> None:
        self.now, self.passes = 0.0, 0
        self._run = runner.run
        runner.run = self.run

    def run(self, work, rows, plan=None):
        for each in work:
            pairs = int(each.part.items[1].sum()) - each.part.rows
            self.now += 3e-3 * each.part.rows + 2e-6 * each.part.rows * (pairs + each.part.rows / 2)
        self.now += 5.0 if not self.passes else 0.0
        self.passes += 1
        return self._run(work, rows)


def runner_of(tokens: int) -> tuple[Runner, KVPool]:
    loaded = tiny("llama")
    pool = KVPool(tokens * 16, 16, 8)
    return Runner(loaded, get_backend("auto", loaded.model.device), pool.slots), pool


def test_measured_cost_is_that_of_the_machine():
    runner, pool = runner_of(1024)
    clock = Passes(runner)
    cost = measured_cost(tiny("llama").spec, runner, pool, clock=lambda: clock.now)
    assert cost.token_s == pytest.approx(3e-3)
    assert cost.pair_s == pytest.approx(2e-6)
    assert clock.passes == 5
    assert pool.free_chunks == pool.chunks


def test_pool_too_small_to_measure_keeps_the_default():
    runner, pool = runner_of(96)
    assert measured_cost(tiny("llama").spec, runner, pool) == PassCost()


def test_pass_cost_is_measured_only_for_cost_eviction(monkeypatch):
    monkeypatch.setattr("inlay.client.local.measured_cost", lambda *about: PassCost(1.0, 7.0))
    costs = []

    def store(pool, keys, policy, cost, states):
        costs.append(cost)
        return SegmentStore(pool, keys, policy, cost, states)

    monkeypatch.setattr("inlay.client.local.SegmentStore", store)
    for eviction in ("cost", "lru"):
        LLM(tiny("llama"), kv_memory="8MiB", eviction=eviction).shutdown()
    assert costs == [PassCost(1.0, 7.0), PassCost()]
