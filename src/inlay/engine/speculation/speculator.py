"""Lookup speculation: drafts of the next tokens, copied from texts in which the answer's last tokens occur.

The texts are the prompt with its modules, the answer itself, and earlier answers under the same cache salt. A draft is
run in the answer's next pass, one row a token. Each row's token is chosen as without a draft, with the row's own step,
penalties and grammar. A draft token is accepted if it equals the token chosen for its place (in_flight.py). So a draft
changes how many tokens a pass gives, and never which. See SuffixDecoding (arXiv 2411.04975) and prompt lookup decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.engine.pass_cost import RowCost
from inlay.engine.request import Request
from inlay.engine.speculation.draft_length import MOST_DRAFT, AcceptanceRates, Chance, choose_lengths
from inlay.engine.speculation.earlier_answers import EarlierAnswers
from inlay.engine.speculation.text_index import MOST_MATCH, GrowingIndex, TextMatch
from inlay.sampling.row import Row
from inlay.types import DRAFT_SOURCES


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


@dataclass(slots=True)
class _Prediction:
    """The next tokens as a text has them.

    Attributes:
        tokens: the predicted tokens, from ``begin`` on.
        begin: the number of the answer's tokens before them.
        text: the text, which may grow behind the match.
        match: the place in the text.
        source: see Draft.
    """

    tokens: tuple[int, ...]
    begin: int
    text: Sequence[int]
    match: TextMatch
    source: str


class _Finder:
    """Predicts the next tokens of one answer, and counts how often that was right."""

    def __init__(self, request: Request, earlier: EarlierAnswers) -> None:
        self._prompt = request.prompt
        self._earlier = earlier
        self._answer = GrowingIndex(request.ids[-MOST_MATCH:])
        self._before = len(self._answer.ids)
        self._prediction: _Prediction | None = None
        self.rates = AcceptanceRates()

    def predict(self, answer: Sequence[int]) -> _Prediction | None:
        """The prediction behind these tokens of the answer. None if its last tokens occur nowhere else."""
        known = len(self._answer.ids) - self._before
        self._answer.extend(answer[known:])
        last = self._prediction
        right = False if last is None else self._count(last, answer)
        self._prediction = self._go_on(last, len(answer)) if right and last is not None else self._find(len(answer))
        return self._prediction

    def _count(self, last: _Prediction, answer: Sequence[int]) -> bool:
        """Count the last prediction against the answer. Returns True if no token of it was wrong."""
        right = 0
        for predicted, token in zip(last.tokens, answer[last.begin :], strict=False):
            if predicted != token:
                self.rates.count(last.match.length, right, 1)
                return False
            right += 1
        self.rates.count(last.match.length, right, 0)
        return True

    def _go_on(self, last: _Prediction, begin: int) -> _Prediction | None:
        """The prediction from the same text behind tokens that it predicted."""
        tokens = begin - last.begin
        if tokens > len(last.tokens):  # it says nothing about the last tokens
            return self._find(begin)
        match = TextMatch(last.match.place + tokens, min(last.match.length + tokens, MOST_MATCH))
        return self._read(last.text, match, last.source, begin) or self._find(begin)

    def _find(self, begin: int) -> _Prediction | None:
        """The prediction from the longest match in all texts. Of equal ones, the nearest text counts."""
        text = self._answer.ids
        found: list[tuple[int, Sequence[int], TextMatch, str]] = []
        own = self._answer.find()
        if own is not None:
            found.append((own.length, text, own, "text"))
        index = self._prompt.text_index()
        match = index.find(text)
        if match is not None:
            source = "module" if self._prompt.in_module(match.place) else "text"
            found.append((match.length, index.ids, match, source))
        earlier = self._earlier.find(self._prompt.request.salt, text)
        if earlier is not None:
            found.append((earlier[1].length, earlier[0].ids, earlier[1], "answer"))
        if not found:
            return None
        _, ids, best, source = max(found, key=lambda each: each[0])
        return self._read(ids, best, source, begin)

    def _read(self, text: Sequence[int], match: TextMatch, source: str, begin: int) -> _Prediction | None:
        """The tokens of a text from a match on. None at its end.

        The answer's own text is read beyond its end: a text that repeats itself goes on to do so.
        """
        tokens = list(text[match.place : match.place + MOST_DRAFT])
        if text is self._answer.ids and tokens:
            period = len(text) - match.place
            tokens = [text[match.place + number % period] for number in range(MOST_DRAFT)]
        return _Prediction(tuple(tokens), begin, text, match, source) if tokens else None


class Speculator:
    """Makes the drafts of all answers.

    Args:
        cost: the measured time of passes by their rows.

    Attributes:
        drafted, accepted: draft tokens that were run, and that answers accepted, by source, since the start.
        earlier: the earlier answers.
    """

    def __init__(self, cost: RowCost) -> None:
        self._cost = cost
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
        predicted: list[tuple[Request, _Prediction]] = []
        chances: list[Chance] = []
        for request in requests:
            prediction = self._predict(request)
            if prediction is not None:
                left = request.sampling.limit - len(request.token_ids) - 1
                rate = self._finders[request].rates.rate(prediction.match.length)
                predicted.append((request, prediction))
                chances.append(Chance(rate, min(len(prediction.tokens), left)))
        if not chances or most <= 0:
            return {}
        lengths = choose_lengths(self._cost, chances, len(requests), rows, most)
        found: dict[Request, Draft] = {}
        for (request, prediction), length in zip(predicted, lengths, strict=True):
            ahead = request.sampling.row.ahead(prediction.tokens[:length]) if length else []
            if ahead:
                found[request] = Draft(prediction.tokens[: len(ahead)], tuple(ahead), prediction.source)
        return found

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
            self.earlier.add(origin.salt, request.token_ids, origin.modules)

    def _predict(self, request: Request) -> _Prediction | None:
        if request.sampling.forced:
            return None
        finder = self._finders.get(request)
        if finder is None:
            finder = self._finders[request] = _Finder(request, self.earlier)
        return finder.predict(request.token_ids)


def counts(found: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Counts by source as plain data."""
    return tuple((source, found[source]) for source in DRAFT_SOURCES)
