"""Log-probabilities of chosen tokens and of the most probable others, under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.sampling.filters import (
    BLOCK,
    UNIT,
    Blocks,
    Floats,
    Listed,
    at_least,
    block_sums,
    blocked,
    pad,
    shortlist,
)
from inlay.sampling.params import SamplingParams
from inlay.sampling.row import SETTINGS, Row
from inlay.sampling.token_rules import Ids

_SHORT_LIST = 64


class TokenLogprob(NamedTuple):
    """A token's natural log-probability under the raw logits, and its rank from 1; ties rank by token id."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one row.

    ``logprob`` is None and ``top`` empty unless log-probabilities were requested. Otherwise ``top`` holds the chosen
    token
    first, then as many of the most probable others as needed for the requested top N.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def report(logits: Tensor, tokens: Ids, wanted: Sequence[int | None]) -> list[Sampled]:
    """The chosen tokens, (rows,), with the requested log-probabilities.

    Args:
        logits: raw logits, (rows, vocabulary).
        wanted: the number of alternatives per row, or None for no log-probabilities.
    """
    sampled = [Sampled(token) for token in tokens.tolist()]
    asked = np.array([place for place, count in enumerate(wanted) if count is not None], dtype=np.int64)
    if len(asked):
        counts = [count for count in wanted if count is not None]
        blocks = blocked(pad(logits[torch.from_numpy(asked).to(logits.device)]))
        expected = _expected(blocks, tokens[asked], max(counts))
        for place, found in zip(asked, entries(tokens[asked], expected, counts), strict=True):
            sampled[place] = found
    return sampled


class Expected(NamedTuple):
    """The model's scores of the chosen tokens and of the most probable tokens.

    Attributes:
        chosen: (rows,), fp32, the logits of the chosen tokens.
        totals: (rows,), the logarithms of the sums of all exponentials.
        ranks: (rows,), from 1.
        ids, values: (rows, at least the wanted number), the most probable tokens and their logits, in order; -inf pads.
    """

    chosen: Floats
    totals: npt.NDArray[np.float64]
    ranks: Ids
    ids: Ids
    values: Floats


def entries(tokens: Ids, expected: Expected, wanted: Sequence[int]) -> list[Sampled]:
    """Chosen tokens, (rows,), with their log-probabilities and those of the ``wanted`` most probable others."""
    own = [
        TokenLogprob(int(token), float(score - total), int(rank))
        for token, score, total, rank in zip(
            tokens, expected.chosen.astype(np.float64), expected.totals, expected.ranks, strict=True
        )
    ]
    found = []
    for one, count, token_ids, scores, total in zip(
        own, wanted, expected.ids, expected.values, expected.totals, strict=True
    ):
        others = [
            TokenLogprob(int(token), float(score) - float(total), place)
            for place, (token, score) in enumerate(zip(token_ids[:count], scores[:count], strict=True), 1)
            if token != one.token_id and score > -np.inf
        ]
        found.append(Sampled(one.token_id, one.logprob, (one, *others)))
    return found


def log_totals(best: Floats, sums: Ids) -> npt.NDArray[np.float64]:
    """The logarithms of the rows' sums of exponentials, from the greatest logits and the sums of weights, both
    (rows,).
    """
    return np.asarray(best + np.log(sums / UNIT))


def _expected(blocks: Blocks, tokens: Ids, most: int) -> Expected:
    places = np.arange(len(tokens))
    chosen = blocks.at(places, tokens // BLOCK).numpy(force=True)[places, tokens % BLOCK]
    rows, ids, values = at_least(blocks, chosen)
    before = (values > chosen[rows]) | ((values == chosen[rows]) & (ids < tokens[rows]))
    ranks = 1 + np.bincount(rows[before], minlength=len(tokens))
    plain = np.array([Row(SamplingParams(), 0).settings] * len(tokens), dtype=SETTINGS)
    best = blocks.maxima.max(axis=1)
    totals = log_totals(best, block_sums(blocks, best, plain).sum(axis=1))
    if not most:
        return Expected(
            chosen, totals, ranks, np.empty((len(tokens), 0), np.int64), np.empty((len(tokens), 0), np.float32)
        )
    leaders = _leaders(blocks, most)
    return Expected(chosen, totals, ranks, leaders.ids, leaders.values)


def _leaders(blocks: Blocks, count: int) -> Listed:
    listed = shortlist(blocks, max(count, _SHORT_LIST))
    crowded = ((listed.values > -np.inf).sum(axis=1) < count) & ~listed.complete
    return shortlist(blocks, blocks.maxima.shape[1]) if crowded.any() else listed
