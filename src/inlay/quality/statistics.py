"""How sure one can be of counts of right answers."""

from __future__ import annotations

import math

_Z95 = 1.959963984540054  # 95% of a normal distribution lie within this many standard deviations


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson 1927): its lower and upper end, both within 0 to 1.

    Arguments:
        successes: how many of the trials succeeded, 0 to trials.
        trials: how many there were, at least 1.
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
    """The exact two-sided p-value of McNemar's test on paired answers.

    If both were equally good, each pair that tells them apart would be a fair coin.

    Arguments:
        only_first, only_second: how many pairs only the first, and only the second, got right; both at least 0.
    """
    assert min(only_first, only_second) >= 0, (only_first, only_second)
    pairs = only_first + only_second
    tail, ways = 0, 1
    for k in range(min(only_first, only_second) + 1):
        tail += ways
        ways = ways * (pairs - k) // (k + 1)  # of choosing k + 1 pairs
    p_value: float = 2 * tail / 2**pairs  # of whole numbers, so that many pairs do not overflow
    return min(1.0, p_value)
