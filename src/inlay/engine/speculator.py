"""Lookup speculation: drafts of the next tokens, copied from texts in which the answer's last tokens occur.

The texts are the prompt with its modules, the answer itself, and earlier answers under the same cache salt. A draft is
run in the answer's next pass, one row a token. Each row's token is chosen as without a draft, with the row's own step,
penalties and grammar. A draft token is accepted if it equals the token chosen for its place (forward.py). So a draft
changes how many tokens a pass gives, and never which. See SuffixDecoding (arXiv 2411.04975) and prompt lookup decoding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from inlay.engine.pass_cost import RowCost
from inlay.engine.request import Request
from inlay.engine.text_index import MOST_MATCH, EarlierAnswer, EarlierAnswers, GrowingIndex
from inlay.sampling.row import Row
from inlay.types import DRAFT_SOURCES

#: The most tokens of one draft.
MOST_DRAFT = 16
#: The most draft rows of one pass.
MOST_ROWS = 256
#: With more answers in a pass, none has a draft: their rows fill the pass, and searching for drafts takes time as well.
MOST_ANSWERS = 32
#: A token with a lower chance is not tried, even where a row costs nothing.
LEAST_CHANCE = 0.05
#: A draft must raise the tokens a second by this share. Less is within the error of the times and the rates.
LEAST_GAIN = 0.1

#: By the least length of a match: the share of accepted tokens that a new answer starts from.
_PRIORS = ((3, 0.3), (4, 0.45), (6, 0.6), (9, 0.75), (16, 0.85))
_PRIOR_TOKENS = 3.0  # the weight of these shares, in tokens
_KEPT = 0.95  # each counted token multiplies the weight of earlier ones by this

_WEIGHT = 0.1  # of a new step in a mean
_FORGOTTEN = 0.998  # the share of ``token_s`` that a step without drafts leaves, so that drafts are tried again
_LONGEST = 3  # a step counts at most this many times the time of its rows, because it may have had to wait


class AcceptanceRates:
    """How many of an answer's predicted tokens were right, as a share, by the length of the match before them.

    Every prediction counts, even if no draft was tried: the answer's next token shows if it was right. So the share
    rises again when an answer begins to copy, without a try.
    """

    def __init__(self) -> None:
        self._right = [share * _PRIOR_TOKENS for _, share in _PRIORS]
        self._all = [_PRIOR_TOKENS] * len(_PRIORS)

    def rate(self, length: int) -> float:
        """Return the chance that a token behind a match of ``length`` tokens is accepted, 0 to 1."""
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


class StepTimes:
    """Moving means of the part of a step's time that RowCost does not predict: scheduling, sampling, lookups, longer
    contexts.

    Batches of similar size share their means: those of 1 answer, of 2 and 3, of 4 to 7, and so on.
    """

    def __init__(self) -> None:
        self._plain_s = defaultdict[int, float](float)
        self._token_s = defaultdict[int, float](float)

    def plain_s(self, answers: int) -> float:
        """Return the seconds of a step without drafts, besides its rows. 0 before the first one."""
        return self._plain_s[answers.bit_length()]

    def token_s(self, answers: int) -> float:
        """Return the seconds that each draft token adds, its row and the plans left out. 0 before the first one."""
        return max(0.0, self._token_s[answers.bit_length()])

    def took(self, cost: RowCost, answers: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step that computed answers alone, with ``drafted`` draft tokens."""
        size, measured_s = answers.bit_length(), cost.seconds(answers + drafted)
        longer_s = min(max(seconds - measured_s, 0.0), _LONGEST * measured_s) - self._plain_s[size]
        if drafted:
            self._token_s[size] += _WEIGHT * ((longer_s - cost.plan_s(answers)) / drafted - self._token_s[size])
        else:
            self._token_s[size] *= _FORGOTTEN
        if not drafted or self._token_s[size] < 0:  # shorter steps with drafts show that the machine has become faster
            self._plain_s[size] += _WEIGHT * longer_s


def choose_lengths(
    cost: RowCost,
    chances: Sequence[Chance],
    answers: int,
    rows: int,
    most: int = MOST_ROWS,
    times: StepTimes | None = None,
) -> list[int]:
    """Return how many tokens of each draft to try, so that the pass gives the most tokens a second. 0 for none.

    A pass gives one token to each answer, and one more for each accepted draft token. Draft tokens are added one by
    one, the likeliest first, and the number with the most expected tokens a second is taken. A pass with drafts costs
    two new plans: its own, and that of the next pass. The time of prompt rows is left out. Beside it,
    the time of draft rows would look small.

    Args:
        cost: the measured time of passes.
        chances: the drafts.
        answers: the number of answers with a token from the pass.
        rows: the rows of the pass without drafts.
        most: the most rows to add.
        times: the measured time of steps besides their rows. None for nothing.
    """
    times = times or StepTimes()
    lengths, best = [0] * len(chances), [0] * len(chances)
    expected, added = float(answers), 0
    plain_s, token_s = times.plain_s(answers), times.token_s(answers)
    drafts_s = plain_s + 2 * cost.plan_s(answers)
    prompts_s = cost.seconds(rows) - cost.seconds(answers)
    best_rate = expected / (cost.seconds(answers) + plain_s) * (1 + LEAST_GAIN)
    # A token below this chance lowers the rate in every pass.
    least = max(LEAST_CHANCE, (cost.least_row_s(rows) + token_s) * best_rate)
    heap = [(-chance.rate, number) for number, chance in enumerate(chances) if chance.most > 0 and chance.rate > least]
    heapify(heap)
    while heap and added < min(most, MOST_ROWS):
        negative, number = heappop(heap)
        if -negative < least:
            break
        lengths[number] += 1
        added += 1
        expected -= negative
        rate = expected / (cost.seconds(rows + added) - prompts_s + drafts_s + added * token_s)
        if rate > best_rate:
            best, best_rate = lengths.copy(), rate
        if lengths[number] < chances[number].most:
            heappush(heap, (negative * chances[number].rate, number))
    return best


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that an answer is likely to have next.

    Attributes:
        tokens: the next tokens, at least one.
        rows: the sampler's row behind each of them.
        source: where they were found, one of DRAFT_SOURCES.
    """

    tokens: tuple[int, ...]
    rows: tuple[Row, ...]
    source: str

    def cut(self, tokens: int) -> Draft | None:
        """The first tokens of the draft; None if that leaves none."""
        return replace(self, tokens=self.tokens[:tokens], rows=self.rows[:tokens]) if tokens > 0 else None


class _Finder:
    """Finds the end of one answer in its texts, and counts how often the text there continues as the answer does.

    A lookup runs in every step of every answer, so no draft is made before it pays.

    Attributes:
        request: the answer.
        rates: how often predicted tokens were right.
        length: the length of the match; 0 if there is none.
    """

    __slots__ = (
        *("_answer", "_before", "_begin", "_earlier", "_from", "_index", "_place", "_text"),
        *("length", "rates", "request"),
    )

    def __init__(self, request: Request, earlier: EarlierAnswers, rates: AcceptanceRates) -> None:
        self.request = request
        self._index = request.prompt.text_index()
        self._earlier = earlier
        self._answer = GrowingIndex(request.ids[-MOST_MATCH:])
        self._before = len(self._answer.ids)
        self.rates = rates
        self.length = 0
        self._text: Sequence[int] = ()  # the text of the match, its place there, and the length of the answer then
        self._place = self._begin = 0
        self._from: EarlierAnswer | None = None  # the earlier answer whose text that is

    def follow(self, answer: Sequence[int]) -> bool:
        """Take the answer's new tokens. Returns True if its end is found in a text that goes on behind it."""
        new = answer[len(self._answer.ids) - self._before :]
        self._answer.extend(new)
        if self._from is not None and self._from.gone:  # it was erased, or its lifetime is over
            self.length = 0
        if not (self.length and self._goes_on(answer[self._begin :])):
            self._find()
        self._begin = len(answer)
        return self.length > 0

    def draft(self, most: int) -> tuple[int, ...]:
        """Return the tokens behind the match, at most ``most``.

        If the match is in the answer's own text, the draft may go on into itself: a text that repeats itself goes on
        repeating.
        """
        text, place = self._text, self._place
        if text is not self._answer.ids:
            return tuple(text[place : place + most])
        period = len(text) - place
        return tuple(text[place + number % period] for number in range(most))

    @property
    def room(self) -> int:
        """Return the most tokens of a draft. With the token behind the draft, the answer may just reach its limit."""
        left = self.request.sampling.limit - len(self.request.token_ids) - 1
        known = MOST_DRAFT if self._text is self._answer.ids else len(self._text) - self._place
        return min(MOST_DRAFT, left, known)

    @property
    def source(self) -> str:
        """Where the match is, one of DRAFT_SOURCES."""
        if self._text is self._index.ids:
            return "module" if self.request.prompt.in_module(self._place) else "text"
        return "text" if self._text is self._answer.ids else "answer"

    def _goes_on(self, new: Sequence[int]) -> bool:
        """Compare the tokens behind the last match with the answer's, and move on. Returns False if one differs."""
        text, place, right = self._text, self._place, 0
        for token in new:
            if place + right == len(text):
                break
            if text[place + right] != token:
                self.rates.count(self.length, right, 1)
                return False
            right += 1
        self.rates.count(self.length, right, 0)
        self._place = place + right
        self.length = min(self.length + right, MOST_MATCH)
        return right == len(new) and self._place < len(text)

    def _find(self) -> None:
        """Find the longest match in all texts. Of equal matches, the answer's own text comes first, then the prompt."""
        answer = self._answer
        best, self._text, self._from = answer.find(), answer.ids, None
        found = self._index.find(answer)
        if found is not None and (best is None or found.length > best.length):
            best, self._text = found, self._index.ids
        earlier = self._earlier.find(self.request.prompt.request.salt, answer)
        if earlier is not None and (best is None or earlier[1].length > best.length):
            self._from, best = earlier
            self._text = self._from.ids
        self._place, self.length = (0, 0) if best is None else best


class Speculator:
    """Makes the drafts of all answers.

    Args:
        cost: the measured time of passes by their rows.
        rates: makes the acceptance rates of an answer.

    Attributes:
        drafted, accepted: draft tokens that were run, and that answers accepted, by source, since the start.
        earlier: the earlier answers.
        times: the time of steps besides their rows.
    """

    def __init__(self, cost: RowCost, rates: Callable[[], AcceptanceRates] = AcceptanceRates) -> None:
        self._cost = cost
        self._rates = rates
        self.times = StepTimes()
        self._finders: dict[Request, _Finder] = {}
        self.earlier = EarlierAnswers()
        self.drafted = Counter[str](dict.fromkeys(DRAFT_SOURCES, 0))
        self.accepted = Counter[str](dict.fromkeys(DRAFT_SOURCES, 0))

    def drafts(self, requests: Sequence[Request], rows: int, most: int) -> dict[Request, Draft]:
        """The drafts that pay in the next pass.

        Args:
            requests: the answers that get their next token in it.
            rows: the rows of the pass without drafts.
            most: the most rows to add.
        """
        found: dict[Request, Draft] = {}
        if most <= 0 or len(requests) > MOST_ANSWERS:
            return found
        finders = [finder for request in requests if (finder := self._follow(request)) is not None]
        if not finders:
            return found
        chances = [Chance(finder.rates.rate(finder.length), finder.room) for finder in finders]
        lengths = choose_lengths(self._cost, chances, len(requests), rows, most, self.times)
        for finder, length in zip(finders, lengths, strict=True):
            if length:
                tokens = finder.draft(length)
                ahead = finder.request.sampling.row.ahead(tokens)
                if ahead:
                    found[finder.request] = Draft(tokens[: len(ahead)], tuple(ahead), finder.source)
        return found

    def took(self, answers: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step that computed answers alone, with ``drafted`` draft tokens."""
        self.times.took(self._cost, answers, drafted, seconds)

    def verified(self, request: Request, draft: Draft, accepted: int) -> None:
        """Count a draft that was run, and its accepted tokens."""
        request.answer.drafted += len(draft.tokens)
        request.answer.accepted += accepted
        self.drafted[draft.source] += len(draft.tokens)
        self.accepted[draft.source] += accepted

    def ended(self, request: Request, *, keep: bool) -> None:
        """Forget an answer that has left the engine. ``keep``: True if later answers may copy from it."""
        self._finders.pop(request, None)
        if keep and not request.sampling.forced:
            origin = request.prompt.origin(float("inf"))
            lifetimes = [part.ttl_s for part in request.prompt.request.parts if part.ttl_s is not None]
            self.earlier.add(origin.salt, request.token_ids, origin.modules, min(lifetimes, default=None))

    def _follow(self, request: Request) -> _Finder | None:
        """The finder of an answer with a match. None without one, and for an answer whose tokens are given."""
        finder = self._finders.get(request)
        if finder is None:
            if request.sampling.forced:
                return None
            finder = self._finders[request] = _Finder(request, self.earlier, self._rates())
        return finder if finder.follow(request.token_ids) else None


def counts(found: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Counts by source as plain data."""
    return tuple((source, found[source]) for source in DRAFT_SOURCES)
