"""How many draft tokens pay: their chance to be accepted against the measured time of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from inlay.engine.pass_cost import RowCost

#: The most tokens of one draft.
MOST_DRAFT = 16
#: The most draft rows of one pass.
MOST_ROWS = 256
#: A token with a lower chance is not tried, even where a row costs nothing.
LEAST_CHANCE = 0.05
#: A draft must raise the tokens a second by this share. Less is within the error of the measured times.
LEAST_GAIN = 0.05

#: By the least length of a match: the share of accepted tokens that a new answer starts from.
_PRIORS = ((3, 0.3), (4, 0.45), (6, 0.6), (9, 0.75), (16, 0.85))
_PRIOR_TOKENS = 3.0  # the weight of these shares, in tokens
_KEPT = 0.95  # the weight of a token after the next one is counted

_DRAFTED_WEIGHT = 0.2  # of the last pass with drafts
_PLAIN_WEIGHT = 0.1  # of the last pass without
_FORGOTTEN = 0.003  # of a measured loss, in each pass without drafts; so drafts are tried again after a while


class AcceptanceRates:
    """The share of predicted tokens of one answer that it has really had, by the length of the match before them.

    Every prediction counts, tried or not: the answer's next token shows if it was right. So the share of an answer that
    begins to copy rises again without a try.
    """

    def __init__(self) -> None:
        self._right = [share * _PRIOR_TOKENS for _, share in _PRIORS]
        self._all = [_PRIOR_TOKENS] * len(_PRIORS)

    def rate(self, length: int) -> float:
        """The chance of a token to be accepted, 0 to 1, behind a match of ``length`` tokens."""
        place = _place(length)
        return self._right[place] / self._all[place]

    def count(self, length: int, right: int, wrong: int) -> None:
        """Count predicted tokens: ``right`` of them agreed, then ``wrong`` of them, 0 or 1, did not."""
        place = _place(length)
        kept = _KEPT ** (right + wrong)
        self._right[place] = self._right[place] * kept + right
        self._all[place] = self._all[place] * kept + right + wrong


def _place(length: int) -> int:
    return max(place for place, (least, _) in enumerate(_PRIORS) if length >= least)


class MeasuredGain:
    """How the tokens a second of passes with drafts compare to the expected ones, by the clock.

    The expected time of a pass leaves out the lookup, the check of drafts and the context of the answers. So drafts
    could lose where they seem to pay. Passes without drafts are measured too, because other programs slow down both.

    Attributes:
        share: the tokens a second of drafts by the expected ones, at most 1.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._plain: float | None = None  # logarithms of measured by expected tokens a second, moving means
        self._drafted = 0.0
        self._replans = False

    def plain(self, cost: RowCost, answers: int, seconds: float) -> None:
        """Take a pass without drafts and without prompt tokens."""
        if self._replans:  # it paid for the plan that the draft before it changed
            self._replans = False
            return
        error = math.log(cost.seconds(answers) / max(seconds, 1e-9))
        if self._plain is None:
            self._plain = error
        self._plain += _PLAIN_WEIGHT * (error - self._plain)
        self._set(self._drafted * (1 - _FORGOTTEN))

    def drafted(self, expected: float, tokens: int, seconds: float) -> None:
        """Take a pass with drafts.

        Args:
            expected: the expected tokens a second.
            tokens: the tokens that the answers got.
            seconds: the time of the pass.
        """
        self._replans = True
        if self._plain is not None:
            error = math.log(tokens / max(seconds, 1e-9) / expected) - self._plain
            self._set(self._drafted + _DRAFTED_WEIGHT * (error - self._drafted))

    def _set(self, drafted: float) -> None:
        self._drafted = drafted
        self.share = math.exp(min(0.0, drafted))


class Chance(NamedTuple):
    """A draft that may be tried.

    Attributes:
        rate: the chance of each token, if those before it are accepted.
        most: its number of tokens.
    """

    rate: float
    most: int


def choose_lengths(
    cost: RowCost, chances: Sequence[Chance], answers: int, rows: int, most: int = MOST_ROWS, share: float = 1.0
) -> tuple[list[int], float]:
    """The number of tokens to try of each draft, for the most tokens a second; 0 where a draft does not pay.

    A pass gives one token to each answer, and one more for each accepted token. Tokens are added in the order of their
    chances. The number with the highest rate counts. A pass with drafts needs a new plan, and the pass behind it too.

    Args:
        cost: the measured time of passes.
        chances: the drafts.
        answers: the number of answers with a token from the pass.
        rows: the rows of the pass without drafts.
        most: the most rows to add.
        share: the tokens a second that drafts give, by the expected ones.

    Returns:
        The numbers, and the expected tokens a second of the pass without its planning.
    """
    lengths, best = [0] * len(chances), [0] * len(chances)
    expected, added = float(answers), 0
    planning_s = 2 * cost.plan_s(answers)
    found = expected / cost.seconds(rows)
    best_rate = found * (1 + LEAST_GAIN)
    # A token below this chance lowers the rate in every pass.
    least = max(LEAST_CHANCE, cost.least_row_s(rows) * best_rate)
    heap = [(-chance.rate, number) for number, chance in enumerate(chances) if chance.most > 0 and chance.rate > least]
    heapify(heap)
    while heap and added < min(most, MOST_ROWS):
        negative, number = heappop(heap)
        if -negative < least:
            break
        lengths[number] += 1
        added += 1
        expected -= negative
        seconds = cost.seconds(rows + added)
        rate = share * expected / (seconds + planning_s)
        if rate > best_rate:
            best, best_rate, found = lengths.copy(), rate, expected / (seconds + planning_s / 2)
        if lengths[number] < chances[number].most:
            heappush(heap, (negative * chances[number].rate, number))
    return best, found


def may_pay(cost: RowCost, answers: int, rows: int, most: int, share: float = 1.0) -> bool:
    """True if drafts of which every token is accepted would pay. The arguments are those of ``choose_lengths``."""
    needed = answers / cost.seconds(rows) * (1 + LEAST_GAIN)
    planning_s = 2 * cost.plan_s(answers)
    most = min(most, MOST_ROWS, answers * MOST_DRAFT)
    # The time is linear between measured numbers of rows, so the best number is one of them or at an end.
    ends = {1, most, *(known - rows for known in cost.rows if 0 < known - rows < most)}
    return any(share * (answers + more) > needed * (cost.seconds(rows + more) + planning_s) for more in ends)
