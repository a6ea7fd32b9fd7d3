"""How many draft tokens pay: their chance to be accepted against the measured time of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from inlay.engine.pass_cost import RowCost

#: The most tokens of one draft.
MOST_DRAFT = 16
#: The most draft rows of one pass.
MOST_ROWS = 256
#: With more answers in a pass, none has a draft: their rows fill the pass, and searching for drafts takes time as well.
MOST_ANSWERS = 32
#: A token with a lower chance is not tried, even where a row costs nothing.
LEAST_CHANCE = 0.05
#: A draft must raise the tokens a second by this share. Less is within the error of the measured times.
LEAST_GAIN = 0.05

#: By the least length of a match: the share of accepted tokens that a new answer starts from.
_PRIORS = ((3, 0.3), (4, 0.45), (6, 0.6), (9, 0.75), (16, 0.85))
_PRIOR_TOKENS = 3.0  # the weight of these shares, in tokens
_KEPT = 0.95  # the weight of a token after the next one is counted


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


class Chance(NamedTuple):
    """A draft that may be tried.

    Attributes:
        rate: the chance of each token, if those before it are accepted.
        most: its number of tokens.
    """

    rate: float
    most: int


def choose_lengths(
    cost: RowCost, chances: Sequence[Chance], answers: int, rows: int, most: int = MOST_ROWS
) -> list[int]:
    """The number of tokens to try of each draft, for the most tokens a second; 0 where a draft does not pay.

    A pass gives one token to each answer, and one more for each accepted token. Tokens are added in the order of their
    chances. The number with the highest rate counts. A pass with drafts needs a new plan, and the pass behind it too.

    Args:
        cost: the measured time of passes.
        chances: the drafts.
        answers: the number of answers with a token from the pass.
        rows: the rows of the pass without drafts.
        most: the most rows to add.
    """
    lengths, best = [0] * len(chances), [0] * len(chances)
    expected, added = float(answers), 0
    planning_s = 2 * cost.plan_s(answers)
    best_rate = expected / cost.seconds(rows) * (1 + LEAST_GAIN)
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
        rate = expected / (cost.seconds(rows + added) + planning_s)
        if rate > best_rate:
            best, best_rate = lengths.copy(), rate
        if lengths[number] < chances[number].most:
            heappush(heap, (negative * chances[number].rate, number))
    return best
