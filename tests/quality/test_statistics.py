"""Known values of the interval and of the test."""

from __future__ import annotations

import math

import pytest

from inlay.quality.modular_qa import mcnemar, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (50, 100, 0.4038, 0.5962),
        (190, 200, 0.9104, 0.9726),
    ],
)
def test_known_intervals(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=6e-5)


@pytest.mark.parametrize("trials", [1, 7, 200])
def test_intervals_hold_the_proportion_and_mirror(trials):
    for successes in range(trials + 1):
        low, high = wilson_interval(successes, trials)
        assert 0 <= low <= successes / trials <= high <= 1
        assert wilson_interval(trials - successes, trials) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(
    ("first", "second", "p_value"),
    [
        (5, 15, 0.04139),
        (0, 0, 1.0),
        (3, 3, 1.0),
        (0, 1, 1.0),
        (0, 5, 0.0625),
        (0, 6, 0.03125),
        (1, 9, 0.021484),
    ],
)
def test_known_p_values(first, second, p_value):
    assert mcnemar(first, second) == pytest.approx(p_value, rel=1e-3)
    assert mcnemar(second, first) == mcnemar(first, second)


def test_many_pairs():
    assert 0 < mcnemar(900, 1100) < 1e-4
    assert mcnemar(0, 1070) == pytest.approx(2 * math.ldexp(1, -1070))
    assert mcnemar(5000, 5000) == 1.0
