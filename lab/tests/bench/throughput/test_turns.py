"""Turns, and the number of requests that a budget allows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from inlay.errors import DeadlineError, ModelError
from inlay_lab.bench.throughput.runs import Answer, Bounds, Pace, Run, affordable, in_turns, pace_of
from inlay_lab.bench.throughput.workload import Workload, shared_prefix

BOUNDS = Bounds(turns=3, batch=4, budget_s=math.inf, limit_s=77.0)


class Fake:
    """A column with a fake clock: a token of a prompt takes 10 ms, a step 1 ms for each of its rows."""

    def __init__(self, *walls: float, error: Exception | None = None) -> None:
        self.walls = list(walls)
        self.error = error
        self.seen: list[tuple[int, float]] = []

    def prompt_tokens(self, workload: Workload) -> int:
        return workload.prompt_tokens(sharing=False)

    def run(self, workload: Workload, limit_s: float) -> Run:
        self.seen.append((len(workload.asks), limit_s))
        if self.error is not None:
            raise self.error
        if self.walls:
            return Run(0.0, [Answer(0.0, [self.walls.pop(0)])])
        first, step = 0.010 * self.prompt_tokens(workload), 0.001 * len(workload.asks)
        times = [first + step * number for number in range(workload.completion)]
        return Run(0.0, [Answer(0.0, times) for _ in workload.asks])


def workload(requests: int = 8, completion: int = 11) -> Workload:
    return shared_prefix(262, requests=requests, prefix=0, question=10, completion=completion)


def test_pace_bounds_the_duration_of_a_run():
    pace = pace_of(Fake(), workload(), 5.0)
    assert pace == Pace(pytest.approx(0.010), pytest.approx(0.002), 2)
    # Two waves of four rows: 80 prompt tokens, and 2 × 10 steps of twice the tried number of rows.
    assert pace.seconds(workload(), 80, batch=4) == pytest.approx(0.8 + 20 * 0.004)
    assert pace.seconds(replace(workload(), clients=2), 80, batch=4) == pytest.approx(0.8 + 40 * 0.002)
    late = workload().arriving(0.001, 0)
    assert pace.seconds(late, 80, batch=4) == late.asks[-1].at
    assert Pace(0.01, 0.0, 2).seconds(workload(requests=1), 10, batch=4) == pytest.approx(0.1)


def test_pace_is_measured_on_a_small_run_within_the_limit():
    fake = Fake()
    pace_of(fake, workload(), 5.0)
    assert fake.seen == [(2, 5.0)]
    assert pace_of(Fake(error=ModelError("no such device")), workload(), 5.0) == "no such device"
    assert pace_of(Fake(error=DeadlineError("too late")), workload(), 5.0) == "too late"


@pytest.mark.parametrize(("budget", "requests"), [(math.inf, 8), (0.881, 8), (0.45, 4), (0.13, 1), (1e-9, 1)])
def test_as_many_requests_as_the_budget_allows(budget, requests):
    fake = Fake()
    pace = Pace.of(fake.run(workload().small(), 1.0), 20)
    cut = affordable(fake, workload(), pace, replace(BOUNDS, budget_s=budget))
    assert len(cut.asks) == requests
    assert cut.asks == workload().asks[:requests]


def test_run_of_median_time_is_returned():
    fakes = {"inlay": Fake(9.0, 3.0, 5.0), "off": Fake(1.0, 2.0, 1.5)}
    told = dict(in_turns(fakes, workload(5), dict.fromkeys(fakes, Pace(0.0, 0.0, 2)), BOUNDS))
    assert {name: run.wall_s for name, run in told.items()} == {"inlay": 5.0, "off": 1.5}
    assert fakes["inlay"].seen == [(5, 77.0)] * 3


def test_column_is_reported_as_soon_as_it_is_done():
    fakes = {"inlay": Fake(1.0), "off": Fake(1.0)}
    turns = in_turns(fakes, workload(5), dict.fromkeys(fakes, Pace(0.0, 0.0, 2)), replace(BOUNDS, turns=1))
    first, _ = next(turns)
    assert [name for name, fake in fakes.items() if fake.seen] == [first]


def test_failing_column_is_reported_once():
    fakes = {"inlay": Fake(1.0, 1.0, 1.0), "off": Fake(error=DeadlineError("too late")), "stock": Fake()}
    paces = {"inlay": Pace(0.0, 0.0, 2), "off": Pace(0.0, 0.0, 2), "stock": "no room"}
    told = list(in_turns(fakes, workload(5), paces, BOUNDS))
    assert sorted(name for name, _ in told) == ["inlay", "off", "stock"]
    assert (dict(told)["off"], dict(told)["stock"]) == ("too late", "no room")
    assert len(fakes["off"].seen) == 1
    assert fakes["stock"].seen == []
