"""Known values of the interval and of the test."""

from __future__ import annotations

import math
import random

import pytest

from inlay.check.statistics import difference_interval, mcnemar, mean_interval, permutation_test, wilson_interval


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


@pytest.mark.parametrize(
    ("only_first", "only_second", "pairs"), [(2, 12, 50), (99, 10, 500), (0, 5, 40), (3, 3, 30), (1, 0, 100)]
)
def test_interval_bounds_agree_with_the_score_test(only_first, only_second, pairs):
    """At a bound, the score with the likeliest share under that difference, found by trying them all, is 1.96."""
    seen = (only_second - only_first) / pairs
    low, high = difference_interval(only_first, only_second, pairs)
    assert low < seen < high
    for bound in (low, high):
        lost = max(
            (share / 20_000 for share in range(1, 20_000) if 0 < share / 20_000 + bound < 1 - share / 20_000),
            key=lambda lost: (
                only_first * math.log(lost)
                + only_second * math.log(lost + bound)
                + (pairs - only_first - only_second) * math.log(1 - 2 * lost - bound)
            ),
        )
        score = (seen - bound) / math.sqrt((2 * lost + bound - bound**2) / pairs)
        assert abs(score) == pytest.approx(1.96, abs=0.01)


def test_bounds_of_a_difference_mirror():
    for only_first, only_second, pairs in ((2, 12, 50), (0, 0, 10), (7, 0, 7), (0, 1, 1)):
        low, high = difference_interval(only_first, only_second, pairs)
        assert difference_interval(only_second, only_first, pairs) == (-high, -low)
        assert -1 <= low <= (only_second - only_first) / pairs <= high <= 1


def test_interval_without_discordant_pairs_is_narrow():
    z = 1.959964
    assert difference_interval(0, 0, 2000)[0] == pytest.approx(-(z**2) / (2000 + z**2), rel=1e-4)
    assert difference_interval(20, 10, 2000)[0] > -0.02 > difference_interval(40, 10, 2000)[0]


def test_permutations_of_equal_differences_are_coins():
    """Where all differences are as large, McNemar's test is the same."""
    for worse, better in ((0, 0), (1, 0), (3, 0), (5, 2), (8, 8), (1, 12)):
        differences = [-0.25] * worse + [0.25] * better + [0.0] * 9
        assert permutation_test(differences) == pytest.approx(mcnemar(worse, better))
    for worse, better in ((20, 12), (30, 5), (200, 190)):  # drawn, not counted
        assert permutation_test([-0.1] * worse + [0.1] * better) == pytest.approx(mcnemar(worse, better), abs=0.012)


@pytest.mark.parametrize(
    ("differences", "p_value"),
    [
        ([0.0, 0.0], 1.0),
        ([0.5], 1.0),
        ([1.0, 2.0, 3.0], 0.25),
        ([3.0, -1.0], 1.0),
        ([4.0, 3.0, -1.0], 0.5),
        ([0.1, 0.2, 0.3, -0.6], 1.0),  # whose sum is zero but for rounding
    ],
)
def test_known_permutations(differences, p_value):
    assert permutation_test(differences) == pytest.approx(p_value)
    assert permutation_test([-each for each in differences]) == permutation_test(differences)


def test_the_interval_of_a_mean():
    rng = random.Random(1)
    differences = [rng.gauss(0.1, 1) for _ in range(400)]
    mean, spread = sum(differences) / 400, 1.96 / 20
    assert mean_interval(differences) == pytest.approx((mean - spread, mean + spread), abs=0.012)
    assert mean_interval(differences) == mean_interval(differences)
    assert mean_interval([0.5]) == (0.5, 0.5)
    low, high = mean_interval([0.0] * 5000 + [1.0] * 5000)
    assert 0.48 < low < 0.5 < high < 0.52
