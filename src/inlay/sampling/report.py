"""Log-probabilities of chosen tokens and of the most probable others, under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.sampling.plain import UNIT, tile_rows, weight_sums
from inlay.sampling.row import Ids

#: So many tokens are packed as fast as they are searched.
_FEW = 4096


class TokenLogprob(NamedTuple):
    """A token's natural log-probability under the raw logits, and its rank from 1; ties rank by token id."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one row.

    ``logprob`` is None and ``top`` empty unless log-probabilities were requested. Otherwise ``top`` holds the chosen
    token first, then as many of the most probable others as needed for the requested top N.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def scores(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Return the scores of the chosen tokens and of the ``most`` most probable ones. Waits for no device.

    Args:
        logits: raw logits, (rows, vocabulary).
        tokens: (rows,), the chosen tokens.

    Returns:
        (rows, 3 + 2 × most), int64: the sum of all weights, the bits of the chosen logit, its rank, then the ids of the
        most probable tokens and the bits of their logits. Fewer columns for a small vocabulary.
    """
    size = tile_rows(logits.device, logits.shape[1])
    parts = [
        _scores(logits[first : first + size].float(), tokens[first : first + size], most)
        for first in range(0, len(tokens), size)
    ]
    return torch.cat(parts)


def _scores(values: Tensor, tokens: Tensor, most: int) -> Tensor:
    ids = torch.arange(values.shape[1], device=values.device)
    own = tokens[:, None]
    chosen = values.gather(1, own)
    before = (values > chosen) | ((values == chosen) & (ids < own))
    ranks = before.sum(dim=1, keepdim=True) + 1
    sums = weight_sums(values)[:, None]
    leaders = _leaders(values, ids, min(most, values.shape[1])) if most else own[:, :0]
    return torch.cat([sums, bits_of(chosen), ranks, leaders, bits_of(values.gather(1, leaders))], dim=1)


def _leaders(values: Tensor, ids: Tensor, most: int) -> Tensor:
    """Return the ids of the greatest values, (rows, most), in order; ties are in order of id."""
    if values.device.type == "cpu" and len(values) == 1 and len(ids) > _FEW:  # pack few tokens instead of all
        reaching = (values[0] >= values.topk(most).values[0, -1]).nonzero()[:, 0]
        if len(reaching) >= most:  # none reaches NaN
            ids, values = reaching, values[:, reaching]
    return torch.topk(_packed(values, ids), most, dim=1, largest=False).values & 0xFFFFFFFF


def _packed(values: Tensor, ids: Tensor) -> Tensor:
    """Return integers whose ascending order is falling value, ties by id."""
    bits = values.add(0.0).view(torch.int32).long()  # the sum turns -0 into 0
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (~rising << 32) | ids


def bits_of(numbers: Tensor) -> Tensor:
    """Return the bits of fp32 numbers as integers."""
    return numbers.contiguous().view(torch.int32).long()


def numbers_of(bits: Ids) -> npt.NDArray[np.float32]:
    """Return the fp32 numbers with these bits, the inverse of ``bits_of``."""
    return np.asarray(bits.astype(np.int32).view(np.float32))


def entries(tokens: Ids, found: Ids, best: npt.NDArray[np.float32], wanted: Sequence[int]) -> list[Sampled]:
    """Return chosen tokens, (rows,), with their log-probabilities and those of the ``wanted`` most probable others.

    Args:
        found: see ``scores``.
        best: (rows,), the greatest logits.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # for rows with NaN or infinities
        totals = np.asarray(best + np.log(found[:, 0] / UNIT))  # the logarithms of the sums of all exponentials
        chosen = numbers_of(found[:, 1]).astype(np.float64) - totals
    ids, values = np.hsplit(found[:, 3:], 2)
    made = []
    for token, logprob, rank, count, token_ids, others, total in zip(
        tokens, chosen, found[:, 2], wanted, ids, numbers_of(np.ascontiguousarray(values)), totals, strict=True
    ):
        own = TokenLogprob(int(token), float(logprob), int(rank))
        top = [
            TokenLogprob(int(other), float(score) - float(total), place)
            for place, (other, score) in enumerate(zip(token_ids[:count], others[:count], strict=True), 1)
            if other != own.token_id and score > -np.inf
        ]
        made.append(Sampled(own.token_id, own.logprob, (own, *top)))
    return made
