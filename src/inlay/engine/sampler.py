"""From logits to tokens: temperature, top-k, top-p, min-p, in that order, and one draw per row.

A draw depends on its own row's logits, parameters, seed and step, never on the rows beside it. Two things see to
that. The random number comes from a counter-based generator on (seed, step). And probabilities are summed as
integers, whose sums do not depend on the order in which a device adds them.

The token is found by inverse CDF, in one of two orders:
- by falling score, ties by token id, where top-k or top-p ask for the most probable tokens. Only a short list of
  them is looked at; the vocabulary is sorted in full only where the short list turns out too short.
- by token id, otherwise: temperature and min-p need no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.types import SamplingParams

# One unit of weight is 2**-40 of the most probable token's: 2**22 tokens of full weight still fit into an int64.
# A token of less than one unit is never drawn.
_UNIT = 2.0**40
_SHORT_LIST = 1024
_MAX_VOCABULARY = 2**22

_Ids = npt.NDArray[np.int64]
_Weights = npt.NDArray[np.int64]


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


class _Short(NamedTuple):
    """A row's most probable tokens by falling score, ties by id; the first ``sure`` are certainly the right ones."""

    scores: npt.NDArray[np.float32]
    ids: _Ids
    weights: _Weights
    sure: int


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    steps: Sequence[int],
    seeds: Sequence[int],
    forbidden: Sequence[Sequence[int]] = (),
) -> list[Sampled]:
    """Choose one token for every row.

    Arguments:
        logits: (rows, vocabulary), any float dtype, any device; left unchanged. All is computed in fp32.
        params: of every row.
        steps: how many tokens the row's answer already has, at least 0.
        seeds: of every row, 0 to 2**64 - 1; see ``request_seed``.
        forbidden: of every row, the token ids that must not be chosen; empty forbids nothing in any row.

    Raises ``InlayError`` where a row holds NaN or +inf, or leaves no token to choose.
    """
    rows, vocabulary = logits.shape
    assert rows == len(params) == len(steps) == len(seeds), "one entry per row"
    assert len(forbidden) in (0, rows), "one entry per row, or none at all"
    assert 0 < vocabulary <= _MAX_VOCABULARY, vocabulary
    raw = logits.detach().float()
    scores = _forbid(raw, forbidden)
    best = scores.max(dim=-1)
    _check(best.values.tolist())
    chosen: list[int] = best.indices.tolist()
    for batch in _batches(params, vocabulary, scores.device):
        picked = [params[row] for row in batch]
        draws = [_draw(seeds[row], steps[row]) for row in batch]
        choose = _choose_by_score if _is_ranked(picked[0], vocabulary) else _choose_by_id
        # A slice is a view; a list of rows is a copy.
        where = slice(batch[0], batch[0] + 1) if len(batch) == 1 else batch
        for row, token in zip(batch, choose(scores[where], best.values[where], picked, draws), strict=True):
            chosen[row] = token
    return [_report(raw[row], token, params[row].logprobs) for row, token in enumerate(chosen)]


def request_seed(params: SamplingParams, request_index: int, entropy: int) -> int:
    """The seed of a request's draws: its own, or one derived from the engine's entropy and the request's number."""
    if params.seed is not None:
        return params.seed
    return int.from_bytes(blake2b(f"{entropy}:{request_index}".encode(), digest_size=8).digest(), "big")


def survivors(logits: Tensor, params: SamplingParams) -> tuple[_Ids, npt.NDArray[np.float64]]:
    """The token ids of one row, logits (vocabulary,), that can be drawn, in drawing order, and their probabilities."""
    scores = logits.detach().float()[None]
    best = scores.amax(dim=-1)
    weights = _weigh(scores, best, [params])
    if _is_ranked(params, scores.shape[1]):
        ids, kept = _rank(scores, weights, [params])[0]
    else:
        kept = _drop_improbable(weights, [params])[0].numpy(force=True)
        ids = np.flatnonzero(kept)
        kept = kept[ids]
    return ids, kept / kept.sum()


def _forbid(scores: Tensor, forbidden: Sequence[Sequence[int]]) -> Tensor:
    pairs = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens]
    if not pairs:
        return scores
    rows, tokens = torch.tensor(pairs, device=scores.device).unbind(dim=1)
    scores = scores.clone()
    scores[rows, tokens] = -math.inf
    return scores


def _check(best: list[float]) -> None:
    for row, score in enumerate(best):
        if math.isfinite(score):
            continue
        if score == -math.inf:
            raise InlayError(f"Row {row} of the logits leaves no token to choose: every one is -inf or forbidden.")
        held = "NaN" if math.isnan(score) else "+inf"
        raise InlayError(f"Row {row} of the logits holds {held}; the model's weights or inputs are damaged.")


def _is_ranked(params: SamplingParams, vocabulary: int) -> bool:
    return params.top_p < 1 or 0 < params.top_k < vocabulary


def _batches(params: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> list[list[int]]:
    """The rows that draw, grouped into those that are worked on at once, in one order of tokens."""
    rows = [row for row, one in enumerate(params) if not one.greedy]
    if device.type == "cpu":
        # On a CPU, exp of the same number may differ in the last bit with its place in a block of rows.
        return [[row] for row in rows]
    by_score = [row for row in rows if _is_ranked(params[row], vocabulary)]
    by_id = [row for row in rows if not _is_ranked(params[row], vocabulary)]
    return [batch for batch in (by_score, by_id) if batch]


def _draw(seed: int, step: int) -> int:
    """64 random bits."""
    return int(np.random.Philox(key=seed, counter=step).random_raw())


def _weigh(scores: Tensor, best: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities at the rows' temperatures relative to the best one's, (rows, vocabulary), int64, in units."""
    temperatures = torch.tensor([one.temperature for one in params], dtype=torch.float32, device=scores.device)
    relative = (scores - best[:, None]).div_(temperatures[:, None]).exp_()
    return relative.mul_(_UNIT).long()


def _drop_improbable(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """min-p."""
    if not any(one.min_p for one in params):
        return weights
    least = torch.tensor([_least(one) for one in params], device=weights.device)
    return weights.masked_fill(weights < least[:, None], 0)


def _least(params: SamplingParams) -> int:
    """The smallest weight that min-p keeps; rounded to fp32 as the weights are."""
    return math.ceil(float(np.float32(params.min_p)) * _UNIT)


def _choose_by_id(scores: Tensor, best: Tensor, params: Sequence[SamplingParams], draws: Sequence[int]) -> list[int]:
    cumulative = _drop_improbable(_weigh(scores, best, params), params).cumsum(dim=-1)
    totals = cumulative[:, -1].tolist()
    targets = torch.tensor([[_target(draw, total)] for draw, total in zip(draws, totals, strict=True)])
    found: list[int] = torch.searchsorted(cumulative, targets.to(scores.device), right=True)[:, 0].tolist()
    return found


def _choose_by_score(scores: Tensor, best: Tensor, params: Sequence[SamplingParams], draws: Sequence[int]) -> list[int]:
    chosen = []
    ranked = _rank(scores, _weigh(scores, best, params), params)
    for (ids, weights), draw in zip(ranked, draws, strict=True):
        cumulative = weights.cumsum()
        target = _target(draw, int(cumulative[-1]))
        chosen.append(int(ids[np.searchsorted(cumulative, target, side="right")]))
    return chosen


def _target(draw: int, total: int) -> int:
    """A number from 0 to total - 1, from 64 random bits."""
    return draw * total >> 64


def _rank(scores: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> list[tuple[_Ids, _Weights]]:
    """Every row's tokens that the filters keep, by falling score, with their weights."""
    totals: list[int] = weights.sum(dim=-1).tolist()
    width = max(_SHORT_LIST, 2 * max(one.top_k for one in params))
    kept = []
    for row, short in enumerate(_shorten(scores, weights, width)):
        count = _count_kept(short, totals[row], params[row])
        if count > short.sure:
            short = _sort(scores[row], weights[row])
            count = _count_kept(short, totals[row], params[row])
        kept.append((short.ids[:count], short.weights[:count]))
    return kept


def _shorten(scores: Tensor, weights: Tensor, width: int) -> list[_Short]:
    vocabulary = scores.shape[1]
    top = scores.topk(min(width, vocabulary), dim=-1)
    arrays = (top.values, top.indices, weights.gather(1, top.indices))
    shorts = []
    for values, ids, heavy in zip(*(array.numpy(force=True) for array in arrays), strict=True):
        order = np.lexsort((ids, -values))
        # Which of the tokens that tie with the last one are in the list is left to chance.
        sure = vocabulary if width >= vocabulary else int((values > values[order[-1]]).sum())
        shorts.append(_Short(values[order], ids[order], heavy[order], sure))
    return shorts


def _sort(scores: Tensor, weights: Tensor) -> _Short:
    full = scores.sort(descending=True, stable=True)
    values, ids, heavy = (array.numpy(force=True) for array in (full.values, full.indices, weights[full.indices]))
    return _Short(values, ids, heavy, sure=len(ids))


def _count_kept(short: _Short, total: int, params: SamplingParams) -> int:
    """How many of the first tokens pass top-k, top-p and min-p; more than ``short.sure`` means that it cannot tell."""
    count = len(short.ids)
    if 0 < params.top_k < count:
        # All that tie with the k-th are kept.
        count = int((short.scores >= short.scores[params.top_k - 1]).sum())
        total = int(short.weights[:count].sum())
        if count > short.sure:
            return count
    if params.top_p < 1:
        before = short.weights[:count].cumsum() - short.weights[:count]
        count = int((before < params.top_p * total).sum())
    if count > short.sure:
        return count
    return int((short.weights[:count] >= max(1, _least(params))).sum())


def _report(raw: Tensor, token: int, wanted: int | None) -> Sampled:
    """The chosen token with the log-probabilities asked for; raw: (vocabulary,), fp32."""
    if wanted is None:
        return Sampled(token)
    total = float(raw.logsumexp(dim=-1))
    score = raw[token]
    rank = 1 + int((raw > score).sum()) + int((raw[:token] == score).sum())
    chosen = TokenLogprob(token, float(score) - total, rank)
    if wanted == 0:
        return Sampled(token, chosen.logprob, (chosen,))
    others = [
        TokenLogprob(int(token_id), float(value) - total, place)
        for place, (value, token_id) in enumerate(_leaders(raw, wanted), 1)
        if token_id != token
    ]
    return Sampled(token, chosen.logprob, (chosen, *others))


def _leaders(scores: Tensor, count: int) -> list[tuple[float, int]]:
    """The ``count`` best (score, token id), ties by id; scores: (vocabulary,)."""
    count = min(count, scores.shape[0])
    least = scores.topk(count).values[-1]
    tied = (scores >= least).nonzero()[:, 0]
    pairs = zip(scores[tied].tolist(), tied.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:count]
