"""The lengths of drafts: what pays by the measured time of a pass."""

from __future__ import annotations

import pytest

from inlay.engine.pass_cost import RowCost, measured_rows
from inlay.engine.speculator import AcceptanceRates, Chance, StepTimes, choose_lengths
from tests.conftest import tiny
from tests.model.engine.driving import Driver

FLAT = RowCost({1: 1.0})
LINEAR = RowCost({1: 1.0, 2: 2.0})


def test_the_time_between_measured_passes_is_interpolated():
    cost = RowCost({1: 1.0, 4: 4.0, 16: 10.0})
    assert [cost.seconds(rows) for rows in (1, 2, 4, 10, 16, 32)] == [1.0, 2.0, 4.0, 7.0, 10.0, 18.0]


def test_more_rows_never_take_less_time():
    cost = RowCost({1: 2.0, 4: 1.0, 8: 3.0})
    assert [cost.seconds(rows) for rows in (1, 3, 4, 8)] == [2.0, 2.0, 2.0, 3.0]


def test_free_rows_are_all_used():
    assert choose_lengths(FLAT, [Chance(0.9, 7), Chance(0.5, 3)], 2, 2) == [7, 3]
    assert choose_lengths(FLAT, [Chance(0.9, 7), Chance(0.5, 3)], 2, 2, most=4) == [4, 0]


def test_rows_at_the_full_price_are_not_used():
    assert choose_lengths(LINEAR, [Chance(0.9, 7)], 1, 1) == [0]


def test_the_likeliest_drafts_are_the_longest():
    cost = RowCost({1: 1.0, 101: 11.0})  # a row costs a tenth of the first one
    few, many = choose_lengths(cost, [Chance(0.5, 16), Chance(0.95, 16)], 2, 2)
    assert 0 <= few < many <= 16


def test_large_batch_gets_shorter_drafts():
    cost = RowCost({1: 1.0, 8: 1.1, 64: 5.0})
    alone = choose_lengths(cost, [Chance(0.7, 16)], 1, 1)
    crowded = choose_lengths(cost, [Chance(0.7, 16)] * 48, 48, 48)
    assert alone[0] > max(crowded)
    assert choose_lengths(cost, [Chance(0.05, 16)] * 48, 48, 48) == [0] * 48


def test_prompts_in_the_pass_make_no_draft_pay():
    cost = RowCost({1: 1.0, 101: 61.0})  # 0.6 s a row
    for prompt in (0, 1, 50):
        assert choose_lengths(cost, [Chance(0.6, 4)], 1, 1 + prompt) == [0]
        assert choose_lengths(cost, [Chance(0.8, 1)], 1, 1 + prompt) == [1]


def test_drafts_must_pay_for_replanning():
    chances = [Chance(0.5, 2)]
    assert choose_lengths(FLAT, chances, 1, 1) == [2]
    assert choose_lengths(RowCost({1: 1.0}, plan_s=0.5), chances, 1, 1) == [0]
    costly = RowCost({1: 1.0}, plan_s=0.01, plan_more_s=0.09)
    assert choose_lengths(costly, chances, 1, 1) == [2]
    assert choose_lengths(costly, chances * 4, 4, 4) == [2] * 4
    assert choose_lengths(costly, chances + [Chance(0, 0)] * 9, 10, 10) == [0] * 10


def test_drafts_must_pay_for_the_measured_time_of_their_steps():
    chances, times = [Chance(0.5, 2)], StepTimes()
    for _ in range(100):
        times.took(FLAT, answers=1, drafted=2, seconds=2.0)
    assert choose_lengths(FLAT, chances, 1, 1) == [2]
    assert choose_lengths(FLAT, chances, 1, 1, times=times) == [0]
    for _ in range(1000):
        times.took(FLAT, answers=1, drafted=0, seconds=1.0)
    assert choose_lengths(FLAT, chances, 1, 1, times=times) == [2], "they are tried again"


def test_time_that_each_step_takes_makes_rows_cheaper():
    times = StepTimes()
    for _ in range(100):
        times.took(LINEAR, answers=1, drafted=0, seconds=4.0)
    assert choose_lengths(LINEAR, [Chance(0.9, 1)], 1, 1) == [0]
    assert choose_lengths(LINEAR, [Chance(0.9, 1)], 1, 1, times=times) == [1]
    assert choose_lengths(LINEAR, [Chance(0.3, 1)], 1, 1, times=times) == [0], "1.3 tokens in 5 s, not 1 in 4 s"


def test_measured_time_of_steps_includes_their_plans():
    cost, times = RowCost({1: 1.0}, plan_s=0.1), StepTimes()
    for _ in range(100):
        times.took(cost, answers=1, drafted=1, seconds=1.1)
    assert choose_lengths(cost, [Chance(0.35, 1)], 1, 1, times=times) == [1], "1.35 tokens in 1.2 s"
    assert choose_lengths(cost, [Chance(0.2, 1)], 1, 1, times=times) == [0]


def test_each_draft_token_pays_for_its_measured_time():
    """Such as attention over a long context: 0.1 s for each of 10 tokens."""
    chances, times = [Chance(0.99, 16)], StepTimes()
    for _ in range(100):
        times.took(FLAT, answers=1, drafted=10, seconds=2.0)
    assert times.token_s(1) == pytest.approx(0.1, abs=1e-3)
    assert choose_lengths(FLAT, [Chance(0.5, 16)], 1, 1, times=times) == [2], "1.75 tokens in 1.2 s, not 1.88 in 1.3 s"
    assert choose_lengths(FLAT, chances, 1, 1, times=times) == [16]


def test_batches_of_other_sizes_have_their_own_times():
    times = StepTimes()
    for _ in range(100):
        times.took(FLAT, answers=16, drafted=0, seconds=2.0)
    assert times.plain_s(16) == times.plain_s(31) == pytest.approx(1.0, abs=1e-3)
    assert times.plain_s(15) == times.plain_s(32) == 0


def test_times_of_a_busy_machine_are_forgotten_although_every_step_has_drafts():
    times = StepTimes()
    for _ in range(100):
        times.took(FLAT, answers=1, drafted=0, seconds=3.0)
    for _ in range(100):
        times.took(FLAT, answers=1, drafted=4, seconds=1.0)
    assert [times.plain_s(1), times.token_s(1)] == pytest.approx([0.0, 0.0], abs=1e-2)


def test_a_step_that_had_to_wait_counts_as_a_long_one_at_most():
    times = StepTimes()
    times.took(FLAT, answers=1, drafted=0, seconds=1e6)
    assert times.plain_s(1) < 1


def test_rates_follow_the_answer():
    rates = AcceptanceRates()
    before = rates.rate(5)
    for _ in range(40):
        rates.count(5, 3, 0)
    assert rates.rate(5) > 0.95 > before
    assert rates.rate(3) < before, "other lengths keep their own rate"
    for _ in range(60):
        rates.count(4, 0, 1)
    assert rates.rate(5) < 0.1


def test_measuring_the_time_of_rows_frees_its_slots():
    driver = Driver(speculation="off")
    ticks = iter(range(1000))
    pool = driver.store.pool
    cost = measured_rows(tiny("llama").spec, driver.engine.runner, pool, clock=lambda: next(ticks))
    assert pool.free_chunks == pool.chunks
    assert cost.seconds(1) == pytest.approx(cost.seconds(16)) == 1.0


class BusyClock:
    """A clock on which a millisecond passes between two readings, but ten between the first few."""

    def __init__(self, busy: int) -> None:
        self._readings = self._now = 0
        self._busy = busy

    def __call__(self) -> float:
        self._readings += 1
        self._now += 10 if self._readings < self._busy else 1
        return self._now / 1000


@pytest.mark.parametrize("busy", range(0, 40, 3))
def test_a_busy_moment_does_not_make_rows_cheap(busy):
    driver = Driver(speculation="off")
    cost = measured_rows(tiny("llama").spec, driver.engine.runner, driver.store.pool, clock=BusyClock(busy))
    assert [cost.seconds(rows) for rows in (1, 4, 16, 64)] == pytest.approx([0.001] * 4)
