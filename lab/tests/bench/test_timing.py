"""Turns, medians and ceilings, with fake meters, since timings do not belong in tests."""

from __future__ import annotations

import pytest

from inlay_lab.bench.machine import Ceilings, clocked, describe_machine, in_turns, measure_ceilings


def meter(log: list[str], name: str, values: list[float]):
    def run() -> float:
        log.append(name)
        return values.pop(0) if len(values) > 1 else values[0]

    return run


def test_first_turn_is_not_counted():
    timed = in_turns({"a": meter([], "a", [9.0, 1.0, 2.0, 30.0, 40.0, 50.0])}, 4)
    assert (timed["a"].seconds, timed["a"].runs) == (1.5, 2)  # a second or more: half as many runs
    assert (timed["a"].ms, timed["a"].fastest) == (1500, 1.0)


def test_slow_meter_runs_once():
    log: list[str] = []
    timed = in_turns({"long": meter(log, "long", [11.0, 1.0]), "b": meter(log, "b", [0.5])}, 3)
    assert log.count("long") == 1
    assert log.count("b") == 4
    assert (timed["long"].seconds, timed["long"].runs) == (11.0, 1)
    assert (timed["b"].seconds, timed["b"].runs) == (0.5, 3)


def test_short_meters_run_more_often_than_requested():
    timed = in_turns({"a": meter([], "a", [0.01]), "b": meter([], "b", [0.015])}, 1)
    assert timed["a"].runs == timed["b"].runs == 10  # turns of 25 ms, up to a quarter of a second
    assert in_turns({"a": meter([], "a", [1e-6])}, 1)["a"].runs == 40


def test_every_turn_runs_every_meter_in_changing_order():
    log: list[str] = []
    in_turns({name: meter(log, name, [0.5]) for name in "abc"}, 6)
    turns = ["".join(log[at : at + 3]) for at in range(0, len(log), 3)]
    assert len(turns) == 7
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 2


def test_progress_counts_turns():
    told: list[tuple[int, int]] = []
    in_turns({"a": meter([], "a", [0.5])}, 3, lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4)]


def test_preparation_is_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("inlay_lab.bench.machine.time.perf_counter", lambda: now[0])

    def takes(seconds: float):
        return lambda: now.__setitem__(0, now[0] + seconds)

    assert clocked(takes(2.0), before=takes(5.0))() == 2.0
    assert now[0] == 7.0


@pytest.mark.parametrize(
    ("flops", "read", "least", "bound"),
    [(3e11, 1e9, 3.0, "compute"), (1e11, 5e10, 5.0, "memory"), (0, 0, 0.0, "memory")],
)
def test_the_ceiling_is_the_slower_of_two(flops, read, least, bound):
    ceilings = Ceilings({"float32": 100.0, "bfloat16": 1.0}, 10.0)
    assert ceilings.seconds(flops, read, "float32") == (pytest.approx(least), bound)


def test_ceilings_and_machine_are_measured():
    ceilings = measure_ceilings(["float32", "bfloat16"], quick=True).report()
    assert set(ceilings["gemm_gflops"]) == {"float32", "bfloat16"}
    assert min(ceilings["gemm_gflops"].values()) > 0.01
    assert ceilings["copy_gb_s"] > 0.01
    assert {"cpu", "threads", "load_1m", "torch", "omp_wait_policy"} <= set(describe_machine())
