"""Log-probabilities of chosen tokens and of the most probable others, under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inlay.engine.sampler_filters import UNIT, block_sums
from inlay.engine.sampler_lists import BLOCK, Blocks, Listed, at_least, shortlist
from inlay.engine.sampler_row import SETTINGS, Ids, Row
from inlay.types import SamplingParams

_SHORT_LIST = 64


class TokenLogprob(NamedTuple):
    """A token's natural log-probability under the raw logits, and its rank from 1; ties rank by token id."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one row.

    ``logprob`` is None and ``top`` empty unless log-probabilities were asked for. Otherwise ``top`` holds the chosen
    token first, then the most probable others, as many as make the asked-for top N complete.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def report(blocks: Blocks, tokens: Ids, wanted: Sequence[int | None]) -> list[Sampled]:
    """The chosen tokens, (rows,), with the log-probabilities asked for.

    blocks: raw logits, (rows, width). wanted: of every row, how many alternatives to tell, or None for nothing at all.
    """
    sampled = [Sampled(int(token)) for token in tokens]
    asked = np.array([place for place, count in enumerate(wanted) if count is not None], dtype=np.int64)
    if len(asked):
        counts = [count for count in wanted if count is not None]
        for place, found in zip(asked, _log_probabilities(blocks.take(asked), tokens[asked], counts), strict=True):
            sampled[place] = found
    return sampled


def _log_probabilities(blocks: Blocks, tokens: Ids, wanted: Sequence[int]) -> list[Sampled]:
    totals = _log_totals(blocks)
    places = np.arange(len(tokens))
    chosen = blocks.at(places, tokens // BLOCK).numpy(force=True)[places, tokens % BLOCK]
    rows, ids, values = at_least(blocks, chosen)
    before = (values > chosen[rows]) | ((values == chosen[rows]) & (ids < tokens[rows]))
    ranks = 1 + np.bincount(rows[before], minlength=len(tokens))
    own = [
        TokenLogprob(int(token), float(score - total), int(rank))
        for token, score, total, rank in zip(tokens, chosen.astype(np.float64), totals, ranks, strict=True)
    ]
    if not any(wanted):
        return [Sampled(one.token_id, one.logprob, (one,)) for one in own]
    leaders = _leaders(blocks, max(wanted))
    found = []
    for one, count, token_ids, scores, total in zip(own, wanted, leaders.ids, leaders.values, totals, strict=True):
        others = [
            TokenLogprob(int(token), float(score) - float(total), place)
            for place, (token, score) in enumerate(zip(token_ids[:count], scores[:count], strict=True), 1)
            if token != one.token_id and score > -np.inf
        ]
        found.append(Sampled(one.token_id, one.logprob, (one, *others)))
    return found


def _leaders(blocks: Blocks, count: int) -> Listed:
    listed = shortlist(blocks, max(count, _SHORT_LIST))
    crowded = ((listed.values > -np.inf).sum(axis=1) < count) & ~listed.complete
    return shortlist(blocks, blocks.maxima.shape[1]) if crowded.any() else listed


def _log_totals(blocks: Blocks) -> npt.NDArray[np.float64]:
    """The logarithm of every row's sum of exponentials, (rows,), from integer weights as draws are."""
    plain = np.array([Row(SamplingParams(), 0).settings] * len(blocks.maxima), dtype=SETTINGS)
    best = blocks.maxima.max(axis=1)
    return np.asarray(best + np.log(block_sums(blocks, best, plain).sum(axis=1) / UNIT))
