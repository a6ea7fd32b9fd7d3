"""A speculator whose drafts are known to be right up to a random token, in place of drafts that are looked up."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from inlay.engine.pass_cost import RowCost
from inlay.engine.request import Request
from inlay.engine.speculator import AcceptanceRates, Draft, Speculator

#: The prompt, the seed and the number of an answer. The seeds of a test's requests differ.
Name = tuple[tuple[int, ...], int | None, int]

#: All rows cost nothing, so every draft pays.
FREE = RowCost({1: 1.0})


class Hopeful(AcceptanceRates):
    """Drafts are tried, however often they are wrong."""

    def rate(self, length: int) -> float:
        return 0.9


class Planted(Speculator):
    """Drafts what an answer will be, up to a random place, and something else after it.

    answers: the tokens of each answer, by name.
    vocabulary: wrong tokens are below this number.
    """

    def __init__(self, answers: Mapping[Name, Sequence[int]], vocabulary: int, seed: int = 0) -> None:
        super().__init__(FREE)
        self.answers = answers
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def drafts(self, requests: Sequence[Request], rows: int, most: int) -> dict[Request, Draft]:
        found = {}
        for request in requests:
            tokens = self._draft(request)[:most]
            ahead = request.sampling.row.ahead(tokens)
            most -= len(ahead)
            if ahead:
                found[request] = Draft(tuple(tokens[: len(ahead)]), tuple(ahead), "text")
        return found

    def _draft(self, request: Request) -> list[int]:
        pick, said = self._random, len(request.token_ids)
        if request.sampling.forced or pick.random() < 0.2:
            return []
        coming = list(self.answers.get((request.ids, request.params.seed, request.index), ())[said:])
        wrong = pick.randrange(9)
        tokens = coming[:wrong] + [pick.randrange(self._vocabulary) for _ in range(pick.randrange(3))]
        return tokens[: max(0, request.sampling.limit - said - 1)]
