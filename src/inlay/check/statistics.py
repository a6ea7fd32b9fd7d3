"""Confidence intervals and tests for counted or scored answers, of one mode or of two on the same questions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

_Z95 = 1.959963984540054  # 95% of a normal distribution lie within this many standard deviations
# The same for Student's t, by degrees of freedom from 1.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_EXACT = 16  # up to this many differences, every choice of signs is counted
_DRAWS = 20_000  # of signs or samples, if there are too many to count
_AT_ONCE = 2**20  # draws per batch, to limit memory


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95% score interval of a proportion (Wilson 1927), as lower and upper bound within 0 to 1.

    Args:
        successes: Number of successful trials, 0 to ``trials``.
        trials: Number of trials, at least 1.
    """
    assert 0 <= successes <= trials, (successes, trials)
    assert trials > 0, "a proportion of nothing"
    share, spread = successes / trials, _Z95**2 / trials
    middle = (share + spread / 2) / (1 + spread)
    reach = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    # At the ends the bound is the proportion itself, which rounding would miss.
    low = 0.0 if successes == 0 else middle - reach
    high = 1.0 if successes == trials else middle + reach
    return low, high


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test on paired answers.

    If both were equally good, each pair with different outcomes would be a fair coin.

    Args:
        only_first: Number of pairs that only the first got right, at least 0.
        only_second: Number of pairs that only the second got right, at least 0.
    """
    assert min(only_first, only_second) >= 0, (only_first, only_second)
    pairs = only_first + only_second
    tail, ways = 0, 1
    for k in range(min(only_first, only_second) + 1):
        tail += ways
        ways = ways * (pairs - k) // (k + 1)  # ways to choose k + 1 pairs
    p_value: float = 2 * tail / 2**pairs  # whole numbers, so many pairs do not overflow
    return min(1.0, p_value)


def difference_interval(only_first: int, only_second: int, pairs: int) -> tuple[float, float]:
    """Return the 95% score interval of a difference of paired proportions (Tango 1998, Statistics in Medicine 17:891).

    The difference is the second minus the first. The interval contains (only_second - only_first) / pairs.

    Args:
        only_first: Number of pairs that only the first got right, at least 0.
        only_second: Number of pairs that only the second got right, at least 0.
        pairs: Number of all pairs, at least 1.
    """
    assert min(only_first, only_second) >= 0, (only_first, only_second)
    assert pairs >= max(1, only_first + only_second), (only_first, only_second, pairs)
    return -_reach(only_second, only_first, pairs), _reach(only_first, only_second, pairs)


def _reach(only_first: int, only_second: int, pairs: int) -> float:
    """Return the upper bound: the largest difference that the sample does not reject at 95%."""
    low, high = (only_second - only_first) / pairs, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        within = _score(only_first, only_second, pairs, middle) >= -_Z95
        low, high = (middle, high) if within else (low, middle)
    return high


def _score(only_first: int, only_second: int, pairs: int, difference: float) -> float:
    """Return the distance of the observed difference from ``difference``, in standard deviations, if ``difference``
    is true.
    """
    a = 2 * pairs
    b = (2 * pairs + only_first - only_second) * difference - only_first - only_second
    c = -only_first * difference * (1 - difference)
    likeliest = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # share of pairs that only the first gets right
    variance = pairs * (2 * likeliest + difference * (1 - difference))
    return (only_second - only_first - pairs * difference) / math.sqrt(variance) if variance > 0 else -math.inf


def permutation_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a paired permutation test of the mean difference.

    If both were equally good, each pair would differ equally often in both directions. Up to 16 non-zero differences,
    all choices of directions are counted. Beyond that, 20,000 random choices are drawn from a fixed seed.

    Args:
        differences: Differences of the two, pair by pair, at least one.
    """
    found = np.array([each for each in differences if each], dtype=np.float64)
    if found.size == 0:
        return 1.0
    # Sums of the same numbers in another order differ by rounding.
    least = abs(float(found.sum())) - 1e-9 * float(np.abs(found).sum())
    if found.size <= _EXACT:
        choices = np.arange(2**found.size)[:, None] >> np.arange(found.size) & 1
        return float((np.abs((2 * choices - 1) @ found) >= least).mean())
    rng, extreme = np.random.default_rng(0), 0
    for many in _portions(found.size):
        signs = 2 * rng.integers(0, 2, (many, found.size), dtype=np.int8) - 1
        extreme += int((np.abs(signs @ found) >= least).sum())
    return (extreme + 1) / (_DRAWS + 1)  # the observed choice counts as one


def mean_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of a mean difference: percentiles of the bootstrap (Efron 1979) with a fixed seed.

    Args:
        differences: Differences, pair by pair, at least one. The interval is too narrow for a handful of them.
    """
    found = np.array(differences, dtype=np.float64)
    assert found.size, "the mean of nothing"
    rng = np.random.default_rng(0)
    means = [found[rng.integers(0, found.size, (many, found.size))].mean(axis=1) for many in _portions(found.size)]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def _portions(size: int) -> Iterator[int]:
    """Yield the number of draws in each batch, for draws of ``size`` numbers."""
    most = max(1, _AT_ONCE // size)
    for done in range(0, _DRAWS, most):
        yield min(most, _DRAWS - done)


def mean_bound(groups: Sequence[Sequence[float]]) -> float:
    """Return the upper 95% bound of a mean of grouped values, such as values grouped by schema.

    Values of one group vary together, so the bound uses the means of the groups. It is the larger of Student's t over
    the groups and the bootstrap, which is larger for skewed values.

    Args:
        groups: Values, at least one in each group. A single group is treated value by value. The bound of a single
            value is
            infinite.
    """
    means = [float(np.mean(group)) for group in groups] if len(groups) > 1 else [float(value) for value in groups[0]]
    if len(means) == 1:
        return math.inf
    free = len(means) - 1
    # Beyond the table: the first two terms of the expansion in 1 / free, accurate to three places there.
    t = _T95[free - 1] if free <= len(_T95) else _Z95 + (_Z95**3 + _Z95) / (4 * free)
    error = float(np.std(means, ddof=1)) / math.sqrt(len(means))
    return max(float(np.mean(means)) + t * error, mean_interval(means)[1])
