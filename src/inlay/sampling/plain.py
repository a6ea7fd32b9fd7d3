"""The specification of choosing tokens, in PyTorch: temperature, min-p, top-k, top-p, typical-p, then a draw.

The first four are in vLLM's order (vllm/v1/sample/sampler.py). vLLM has no typical-p; it comes last, as in
transformers. Rows take one of three paths:
- *free*: only temperature and min-p. Tokens are in order of their ids.
- *ranked*: top-k or top-p. Tokens are in order of falling score, ties by id.
- *typical*: typical-p. Tokens are in order of typicality.

Weights are integers, so their sums do not depend on the order of addition or on other rows. Each weight is computed
from IEEE operations alone. So it has the same bits at every place of an array, on any device, and in the compiled
kernel (csrc/choose.inl).

On a device no operation depends on values that the device computes, so nothing waits for it. Whole rows are sorted
there, and rows without an allowed token get some token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.models.device import upload
from inlay.sampling.row import SETTINGS, Ids, Row, adjust

Bits = npt.NDArray[np.uint64]
Settings = npt.NDArray[np.void]

# One unit of weight is 2**-40 of the most probable token's weight. So 2**22 tokens of full weight fit into an int64. A
# token of less than one unit is never drawn.
UNIT = 2.0**40
_LEAST_LOG = -64.0  # far below any nonzero weight; avoids 0 times infinity
DEVICE_TILE = 2**22  # numbers per tile; each takes about 40 bytes
HOST_TILE = 2**17  # fits into the processor's cache
SHORT_LIST = 1024


class ChosenTokens(NamedTuple):
    """A token for every row.

    Attributes:
        tokens: (rows,), int64; meaningless where ``best`` is not finite.
        raw, best: (rows,), fp32, the greatest logit before and after adjustment; NaN if the row contains one.
    """

    tokens: Tensor
    raw: Tensor
    best: Tensor


def choose(logits: Tensor, rows: Sequence[Row], bits: Bits) -> ChosenTokens:
    """Choose one token per row. Only launches operations on a device, and waits for none.

    Args:
        logits: (rows, vocabulary), left unchanged.
        bits: (rows,), 64 random bits each.
    """
    vocabulary = logits.shape[1]
    raw = logits.detach().float()
    scores = adjust(raw, rows, vocabulary)
    best = scores.amax(dim=1)
    tokens = scores.argmax(dim=1)  # the lowest id of a tie
    for asked in _asked(rows, vocabulary, bits, scores.device):
        kept = asked.path(scores.index_select(0, asked.rows), best[asked.rows, None], asked)
        tokens.index_copy_(0, asked.rows, kept.draw(asked))
    return ChosenTokens(tokens, raw.amax(dim=1), best)


def kept(logits: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """Return the token ids that can be drawn from logits, (vocabulary,), in drawing order, and their weights."""
    scores = adjust(logits[None].float(), [row], len(logits))
    (asked,) = _asked([row], len(logits), np.zeros(1, np.uint64), logits.device)
    ids, weights = asked.path(scores.clone(), scores.amax(dim=1, keepdim=True), asked)
    ids = torch.arange(len(logits))[None] if ids is None else ids
    return ids[weights > 0], weights[weights > 0]


def tile_rows(device: torch.device, width: int) -> int:
    """Return the number of rows of this width that are computed at once. Tiles bound the memory of a step."""
    return max(1, (HOST_TILE if device.type == "cpu" else DEVICE_TILE) // width)


class _KeptTokens(NamedTuple):
    """Token ids in drawing order, (rows, tokens), and their weights, 0 for filtered tokens. No ids: all, in order."""

    ids: Tensor | None
    weights: Tensor

    def draw(self, asked: _RowParams) -> Tensor:
        """Return the tokens that the random numbers select, (rows,)."""
        ends = self.weights.cumsum(dim=1)
        targets = scaled_down(asked.draws, ends[:, -1])
        columns = torch.searchsorted(ends, targets[:, None], right=True).clamp_(max=ends.shape[1] - 1)
        return (columns if self.ids is None else self.ids.gather(1, columns))[:, 0]


class _RowParams(NamedTuple):
    """Parameters of some rows on their device, as columns (rows, 1).

    ``rows`` are their indices, (rows,). ``draws`` are the random bits, (rows, 4), sixteen per column, the lowest first.
    ``limited``, ``ranked`` and ``typical`` are True if any row has a top-k, a top-k or top-p, or a typical-p.
    """

    path: Callable[[Tensor, Tensor, _RowParams], _KeptTokens]
    rows: Tensor
    draws: Tensor
    top_k: Tensor
    inverse: Tensor
    min_p: Tensor
    top_p: Tensor
    typical_p: Tensor
    limited: bool
    ranked: bool
    typical: bool


def _asked(rows: Sequence[Row], vocabulary: int, bits: Bits, device: torch.device) -> Iterator[_RowParams]:
    """Yield the parameters of the rows that draw, some rows of one path at a time."""
    settings = np.array([row.settings for row in rows], dtype=SETTINGS)
    settings["top_k"][settings["top_k"] >= vocabulary] = 0
    draws = np.array([not row.params.greedy for row in rows], dtype=bool)
    ranked = (settings["top_k"] > 0) | (settings["top_p"] < 1)
    typical = settings["typical_p"] < 1
    size = tile_rows(device, vocabulary)
    for path, held in ((_free, ~ranked & ~typical), (_ranked, ranked & ~typical), (_typical, typical)):
        places = np.flatnonzero(held & draws)
        for first in range(0, len(places), size):
            some = places[first : first + size]
            yield _uploaded(path, some, settings[some], bits[some], device)


def _uploaded(
    path: Callable[[Tensor, Tensor, _RowParams], _KeptTokens],
    places: Ids,
    settings: Settings,
    bits: Bits,
    device: torch.device,
) -> _RowParams:
    draws = [(bits >> np.uint64(16 * part)) & np.uint64(0xFFFF) for part in range(4)]
    whole = [places, settings["top_k"], *(part.astype(np.int64) for part in draws)]
    shares = [settings[name].astype(np.float64) for name in ("inverse", "min_p", "top_p", "typical_p")]
    there = upload(np.stack(whole + [each.view(np.int64) for each in shares]), device)
    inverse, min_p, top_p, typical_p = there[6:].view(torch.float64)[:, :, None]
    return _RowParams(
        path=path,
        rows=there[0],
        draws=there[2:6].T,
        top_k=there[1][:, None],
        inverse=inverse.float(),
        min_p=min_p.float(),
        top_p=top_p,
        typical_p=typical_p,
        limited=bool((settings["top_k"] > 0).any()),
        ranked=bool(((settings["top_k"] > 0) | (settings["top_p"] < 1)).any()),
        typical=bool((settings["typical_p"] < 1).any()),
    )


def _free(scores: Tensor, best: Tensor, asked: _RowParams) -> _KeptTokens:
    """Keep tokens in order of id. ``scores``, (rows, width), are overwritten; ``best`` is (rows, 1)."""
    return _KeptTokens(None, _weights(_scaled(scores, best, asked), asked))


def _ranked(scores: Tensor, best: Tensor, asked: _RowParams) -> _KeptTokens:
    """Keep tokens by falling score."""
    ids, _, weights = _by_rank(*sorted_rows(scores), best, asked)
    return _KeptTokens(ids, weights)


def _typical(scores: Tensor, best: Tensor, asked: _RowParams) -> _KeptTokens:
    """Keep the tokens that pass top-k and top-p, the most typical first."""
    if asked.ranked:
        ids, logs, weights = _by_rank(*sorted_rows(scores), best, asked)
        logs, weights = (torch.empty_like(each).scatter_(1, ids, each) for each in (logs, weights))  # in order of id
    else:
        logs = _scaled(scores, best, asked)
        weights = _weights(logs.clone(), asked)
    totals = weights.sum(dim=1, keepdim=True)
    moments = (weights.double() * -logs).long().sum(dim=1, keepdim=True)
    mean = -(moments.double() / totals.clamp(min=1).double())
    nearness = logs.sub_(mean.float()).abs_().neg_().masked_fill_(weights == 0, -math.inf)
    columns = _short_list(nearness)
    if columns is not None and weights[:, columns].sum(dim=1) >= asked.typical_p * totals:
        nearness, places = sorted_rows(nearness[:, columns])
        ids = columns[places]
    else:
        nearness, ids = sorted_rows(nearness)
    weights = weights.gather(1, ids)
    _keep_first(weights, asked.typical_p, totals, ties=nearness)
    return _KeptTokens(ids, weights)


def _short_list(values: Tensor) -> Tensor | None:
    """Return the columns of the greatest values of a single row on the host, with all that tie with the last.

    Sorting these is four times faster than sorting a vocabulary of 150,000 tokens. Returns None for other rows.
    """
    if values.device.type != "cpu" or len(values) != 1 or values.shape[1] <= 4 * SHORT_LIST:
        return None
    columns = (values[0] >= values.topk(SHORT_LIST, dim=1).values[0, -1]).nonzero()[:, 0]
    return columns if len(columns) >= SHORT_LIST else None  # none reaches NaN


def _by_rank(values: Tensor, ids: Tensor, best: Tensor, asked: _RowParams) -> tuple[Tensor, Tensor, Tensor]:
    """Apply top-k and top-p to falling values, which are overwritten.

    Returns:
        Ids, scaled logarithms and weights by falling score.
    """
    logs = _scaled(values.clone() if asked.limited else values, best, asked)
    weights = _weights(logs.clone() if asked.typical else logs, asked)
    if asked.limited:
        last = asked.top_k.clamp(1, values.shape[1]) - 1
        weights.masked_fill_((asked.top_k > 0) & (values < values.gather(1, last)), 0)  # ties are kept
    _keep_first(weights, asked.top_p, weights.sum(dim=1, keepdim=True))
    return ids, logs, weights


def sorted_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return falling values and their columns; ties are in order of column."""
    found = torch.sort(values.add_(0.0), dim=1, descending=True, stable=True)  # the sum turns -0 into 0
    return found.values, found.indices


def _scaled(scores: Tensor, best: Tensor, asked: _RowParams) -> Tensor:
    """Return logarithms of probabilities relative to the best token, at the temperature. Overwrites ``scores``."""
    return scores.sub_(best).mul_(asked.inverse).clamp_(min=_LEAST_LOG)


def _weights(logs: Tensor, asked: _RowParams) -> Tensor:
    """Return the weights of the tokens that pass min-p, (rows, width), int64. Overwrites ``logs``."""
    exponential(logs)
    return logs.mul_(logs >= asked.min_p).mul_(UNIT).long()


def weight_sums(logits: Tensor) -> Tensor:
    """Return the sum of all weights of each row at temperature 1, (rows,), int64."""
    logs = logits.sub(logits.amax(dim=1, keepdim=True)).clamp_(min=_LEAST_LOG)
    return exponential(logs).mul_(UNIT).long().sum(dim=1)


def _keep_first(weights: Tensor, share: Tensor, totals: Tensor, ties: Tensor | None = None) -> None:
    """Give weight 0 to all tokens behind the first ones that reach their share of the total.

    Args:
        ties: the values that order the rows. If given, tokens that tie with the last kept one stay too.
    """
    before = weights.cumsum(dim=1).sub_(weights)
    behind = (before >= share * totals) & (share < 1)
    if ties is not None:
        last = (~behind & (weights > 0)).sum(dim=1, keepdim=True).clamp_(min=1) - 1
        behind &= ties < ties.gather(1, last)
    weights.masked_fill_(behind, 0)


def scaled_down(draws: Tensor, totals: Tensor) -> Tensor:
    """Return numbers from 0 to total - 1: draw · total / 2⁶⁴, rounded down, in integers of 64 bits.

    Args:
        draws: (rows, 4), sixteen bits each, the lowest first.
        totals: (rows,), at most 2⁶².
    """
    high, low = totals >> 31, totals & (2**31 - 1)
    found = torch.zeros_like(totals)
    for part in draws.unbind(1):
        # (part · total + found) / 2¹⁶. The high half needs no rounding.
        found = ((part * high) << 15) + ((part * low + found) >> 16)
    return found


# The natural exponential of numbers from _LEAST_LOG to 0 as in Cephes (expf, to 2 units in the last place). The last
# bit of PyTorch's and numpy's own depends on the device and on the place in an array.
_WHOLE = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_FIRST, *_REST = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1


def exponential(logs: Tensor) -> Tensor:
    """Compute the natural exponential of fp32 numbers from _LEAST_LOG to 0, in place.

    Every product and sum is rounded by itself.
    """
    shifted = logs.mul(1.44269504088896341).add_(_WHOLE)
    whole = shifted.sub(_WHOLE)
    logs.sub_(whole.mul(_LN2_HIGH)).sub_(whole.mul_(_LN2_LOW))
    series = torch.mul(logs, _FIRST, out=whole).add_(_REST[0])
    for factor in _REST[1:]:
        series.mul_(logs).add_(factor)
    series.mul_(logs.square()).add_(logs).add_(1.0)
    logs.view(torch.int32).copy_(series.view(torch.int32)).add_(shifted.view(torch.int32).bitwise_left_shift_(23))
    return logs
