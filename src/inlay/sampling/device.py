"""Chooses tokens on the device that holds the logits, without waiting for it. The tokens equal the host's.

filters.py and sampler.py are the specification; weights are the same integers. Here no operation depends on values
that the device computes. So whole rows are sorted instead of short lists, and rows without an allowed token get some
token first and their error later. Parameters are uploaded in few copies from pinned memory. Tokens and
log-probabilities come back in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.models.device import Download, upload
from inlay.sampling.compiled import Bits, Chosen
from inlay.sampling.filters import UNIT, Settings, exponential, pad
from inlay.sampling.report import Expected, Sampled, entries, log_totals
from inlay.sampling.row import SETTINGS, Row, adjust
from inlay.sampling.token_rules import Ids

_LEAST_LOG = -64.0  # see filters.py
TILE = 2**22  # numbers per tile; each takes about 40 bytes


class Launched:
    """Tokens that a device is choosing.

    Attributes:
        tokens: (rows,), int64, on the device. A row without an allowed token has an arbitrary token.
    """

    def __init__(self, logits: Tensor, rows: Sequence[Row], bits: Bits) -> None:
        """See ``sampler.begin``. ``bits``: (rows,), 64 random bits each."""
        with torch.inference_mode():
            chosen = choose(logits, rows, bits)
            self.tokens = chosen.tokens
            self._wanted = [row.params.logprobs for row in rows]
            self._asked = np.flatnonzero([count is not None for count in self._wanted])
            told = [chosen.tokens, _bits_of(chosen.raw), _bits_of(chosen.best)]
            if len(self._asked):
                most = max(count for count in self._wanted if count is not None)
                told += _expected(logits, chosen.tokens, self._asked, most)
            self._coming = Download(torch.cat([each.flatten() for each in told]))

    def wait(self) -> tuple[Chosen, list[Sampled]]:
        """Wait for the tokens and the requested log-probabilities. Those of rows without an allowed token are
        meaningless.
        """
        rows, asked = len(self._wanted), len(self._asked)
        told = self._coming.wait()
        tokens, raw, best = told[: 3 * rows].reshape(3, rows)
        chosen = Chosen(tokens, _floats(raw), _floats(best))
        sampled = [Sampled(token) for token in tokens.tolist()]
        if asked:
            told = told[3 * rows :]
            sums, scores, ranks = told[: 3 * asked].reshape(3, asked)
            ids, values = told[3 * asked :].reshape(2, asked, -1)
            counts = [count for count in self._wanted if count is not None]
            with np.errstate(divide="ignore", invalid="ignore"):  # for rows with NaN or infinities
                totals = log_totals(chosen.raw[self._asked], sums)
                expected = Expected(_floats(scores), totals, ranks, ids, _floats(values))
                found = entries(tokens[self._asked], expected, counts)
            for place, one in zip(self._asked, found, strict=True):
                sampled[place] = one
        return chosen, sampled


class DeviceTokens(NamedTuple):
    """``Chosen`` on a device: tokens (rows,), int64; raw and best (rows,), fp32."""

    tokens: Tensor
    raw: Tensor
    best: Tensor


def choose(logits: Tensor, rows: Sequence[Row], bits: Bits) -> DeviceTokens:
    """Choose one token per row; see ``sampler.choose``. Only launches operations and waits for none."""
    vocabulary = logits.shape[1]
    raw = pad(logits)
    scores = adjust(raw, rows, vocabulary)
    best = scores.amax(dim=1)
    tokens = scores.argmax(dim=1)  # the lowest id of a tie
    settings = np.array([row.settings for row in rows], dtype=SETTINGS)
    settings["top_k"][settings["top_k"] >= vocabulary] = 0
    for path, places in _paths(settings, np.array([row.params.greedy for row in rows], dtype=bool)):
        size = max(1, TILE // scores.shape[1])
        for first in range(0, len(places), size):
            some = places[first : first + size]
            asked = _RowParams.of(some, settings, bits, scores.device)
            drawn = path(scores.index_select(0, asked.rows), best[asked.rows, None], asked)
            tokens.index_copy_(0, asked.rows, drawn)
    return DeviceTokens(tokens.clamp_(0, vocabulary - 1), raw.amax(dim=1), best)


class _RowParams(NamedTuple):
    """Parameters of some rows on the device, as columns (rows, 1).

    ``rows`` are their indices, (rows,). ``draws`` are the random bits, (rows, 4), sixteen per column, the lowest first.
    ``limited`` and ``typical`` are True if any row has a top-k or a typical-p.
    """

    rows: Tensor
    draws: Tensor
    top_k: Tensor
    inverse: Tensor
    min_p: Tensor
    top_p: Tensor
    typical_p: Tensor
    limited: bool
    typical: bool

    @classmethod
    def of(cls, places: Ids, settings: Settings, bits: Bits, device: torch.device) -> _RowParams:
        settings = settings[places]
        draws = [(bits[places] >> np.uint64(16 * part)) & np.uint64(0xFFFF) for part in range(4)]
        whole = [places, settings["top_k"], *(part.astype(np.int64) for part in draws)]
        shares = [settings[name].astype(np.float64) for name in ("inverse", "min_p", "top_p", "typical_p")]
        there = upload(np.stack(whole + [each.view(np.int64) for each in shares]), device)
        inverse, min_p, top_p, typical_p = there[6:].view(torch.float64)[:, :, None]
        return cls(
            rows=there[0],
            draws=there[2:6].T,
            top_k=there[1][:, None],
            inverse=inverse.float(),
            min_p=min_p.float(),
            top_p=top_p,
            typical_p=typical_p,
            limited=bool((settings["top_k"] > 0).any()),
            typical=bool((settings["typical_p"] < 1).any()),
        )


_Path = Callable[[Tensor, Tensor, _RowParams], Tensor]


def _paths(settings: Settings, greedy: npt.NDArray[np.bool_]) -> Iterator[tuple[_Path, Ids]]:
    """The paths and their rows, as in sampler.py, except that all rows with typical-p are typical."""
    ranked = (settings["top_k"] > 0) | (settings["top_p"] < 1)
    typical = settings["typical_p"] < 1
    for path, held in (
        (_free, ~ranked & ~typical),
        (_ranked, ranked & ~typical),
        (_typical, typical),
    ):
        places = np.flatnonzero(held & ~greedy)
        if len(places):
            yield path, places


def _free(scores: Tensor, best: Tensor, asked: _RowParams) -> Tensor:
    """Draw from tokens in order of id. ``scores``, (rows, width), are overwritten; ``best`` is (rows, 1)."""
    return _drawn(_weights(_scaled(scores, best, asked), asked), asked)


def _ranked(scores: Tensor, best: Tensor, asked: _RowParams) -> Tensor:
    """Draw from tokens by falling score."""
    ids, _, weights = _by_rank(scores, best, asked)
    return ids.gather(1, _drawn(weights, asked)[:, None])[:, 0]


def _typical(scores: Tensor, best: Tensor, asked: _RowParams) -> Tensor:
    """Draw from the tokens that pass top-k and top-p, the most typical first."""
    ids, logs, weights = _by_rank(scores, best, asked)
    logs, weights = (torch.empty_like(each).scatter_(1, ids, each) for each in (logs, weights))  # in order of id
    totals = weights.sum(dim=1, keepdim=True)
    moments = (weights.double() * -logs).long().sum(dim=1, keepdim=True)
    mean = -(moments.double() / totals.clamp(min=1).double())
    nearness = logs.sub_(mean.float()).abs_().neg_().masked_fill_(weights == 0, -math.inf)
    nearness, ids = _sorted(nearness)
    weights = weights.gather(1, ids)
    _keep_first(weights, asked.typical_p, totals, ties=nearness)
    return ids.gather(1, _drawn(weights, asked)[:, None])[:, 0]


def _by_rank(scores: Tensor, best: Tensor, asked: _RowParams) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, scaled logarithms and weights by falling score, with top-k and top-p applied."""
    values, ids = _sorted(scores)
    logs = _scaled(values.clone() if asked.limited else values, best, asked)
    weights = _weights(logs.clone() if asked.typical else logs, asked)
    if asked.limited:
        last = asked.top_k.clamp(1, values.shape[1]) - 1
        weights.masked_fill_((asked.top_k > 0) & (values < values.gather(1, last)), 0)  # ties are kept
    _keep_first(weights, asked.top_p, weights.sum(dim=1, keepdim=True))
    return ids, logs, weights


def _sorted(values: Tensor) -> tuple[Tensor, Tensor]:
    """Falling values, and their columns; ties are in order of column."""
    found = torch.sort(values.add_(0.0), dim=1, descending=True, stable=True)  # the sum turns -0 into 0
    return found.values, found.indices


def _scaled(scores: Tensor, best: Tensor, asked: _RowParams) -> Tensor:
    return scores.sub_(best).mul_(asked.inverse).clamp_(min=_LEAST_LOG)


def _weights(logs: Tensor, asked: _RowParams) -> Tensor:
    """``filters.weigh``; overwrites ``logs``."""
    exponential(logs)
    return logs.mul_(logs >= asked.min_p).mul_(UNIT).long()


def _keep_first(weights: Tensor, share: Tensor, totals: Tensor, ties: Tensor | None = None) -> None:
    """``filters._keep_first``."""
    before = weights.cumsum(dim=1).sub_(weights)
    behind = (before >= share * totals) & (share < 1)
    if ties is not None:
        last = (~behind & (weights > 0)).sum(dim=1, keepdim=True).clamp_(min=1) - 1
        behind &= ties < ties.gather(1, last)
    weights.masked_fill_(behind, 0)


def _drawn(weights: Tensor, asked: _RowParams) -> Tensor:
    """The columns that the random numbers select, (rows,)."""
    ends = weights.cumsum(dim=1)
    targets = scaled_down(asked.draws, ends[:, -1])
    return torch.searchsorted(ends, targets[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def scaled_down(draws: Tensor, totals: Tensor) -> Tensor:
    """Numbers from 0 to total - 1: draw · total / 2⁶⁴, rounded down, in integers of 64 bits.

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


def _expected(logits: Tensor, tokens: Tensor, asked: Ids, most: int) -> list[Tensor]:
    """``report.Expected`` of some rows as integers: sums of weights, chosen, ranks, then ids and values."""
    rows = upload(asked, logits.device)
    values = pad(logits.index_select(0, rows))
    ids = torch.arange(values.shape[1], device=values.device)
    own = tokens[rows, None]
    chosen = values.gather(1, own)
    before = (values > chosen) | ((values == chosen) & (ids < own))
    logs = values.sub(values.amax(dim=1, keepdim=True)).clamp_(min=_LEAST_LOG)
    sums = exponential(logs).mul_(UNIT).long().sum(dim=1)
    leaders = torch.topk(_packed(values, ids), min(most, values.shape[1]), dim=1, largest=False).values & 0xFFFFFFFF
    ranks = before.sum(dim=1) + 1
    return [sums, _bits_of(chosen), ranks, leaders, _bits_of(values.gather(1, leaders))]


def _packed(values: Tensor, ids: Tensor) -> Tensor:
    """``filters.pack``."""
    bits = values.add(0.0).view(torch.int32).long()
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (~rising << 32) | ids


def _bits_of(numbers: Tensor) -> Tensor:
    """The bits of fp32 numbers as integers."""
    return numbers.contiguous().view(torch.int32).long()


def _floats(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The inverse of ``_bits_of``."""
    return np.asarray(numbers.astype(np.int32).view(np.float32))
