"""Filters and weights of tokens: temperature, min-p, top-k, top-p, typical-p, in that order.

The first four are in vLLM's order (vllm/v1/sample/sampler.py). vLLM has no typical-p; it comes last, as in
transformers.

The most probable tokens are found without sorting the vocabulary. One pass over memory gives the greatest value in
every block of 32 columns. The width-th greatest of these is a bound that at least ``width`` tokens reach. All tokens
that reach it, ties included, lie in the few blocks whose maximum reaches it. They are sorted by falling value, ties by
token id. Value and id are packed into one integer, so one sort gives both.

Weights are integers, so their sums do not depend on the order of addition or on other rows. Each weight is computed
from IEEE operations alone. So it has the same bits at every place of an array, on any device, and in the compiled
kernel (csrc/choose.inl). This file is that kernel's specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.sampling.token_rules import Ids

BLOCK = 32
_CROWD = 4  # limit for blocks that reach the bound, as a multiple of the width; a row with more ties gets an empty list
_LAST = np.iinfo(np.int64).max

Floats = npt.NDArray[np.float32]


class Blocks(NamedTuple):
    """Rows of values in blocks of columns.

    Attributes:
        values: (all rows, width), fp32. The width is a multiple of BLOCK; -inf pads.
        rows: the selected rows, (rows,).
        maxima: (rows, width / BLOCK), the greatest value of every block; NaN if the block contains one.
    """

    values: Tensor
    rows: Ids
    maxima: Floats

    def take(self, rows: Ids) -> Blocks:
        """A subset of the rows. Only the maxima are copied."""
        return Blocks(self.values, self.rows[rows], self.maxima[rows])

    def at(self, rows: Ids, numbers: Ids) -> Tensor:
        """The values of some blocks, (blocks, BLOCK), given by row and block number."""
        device = self.values.device
        where = torch.from_numpy(self.rows[rows]).to(device), torch.from_numpy(numbers).to(device)
        return in_blocks(self.values)[where]


class Listed(NamedTuple):
    """The best tokens of every row, in order, padded with -inf.

    Attributes:
        ids, values: (rows, longest list).
        complete: (rows,), True if the list contains every token with a value above -inf.
    """

    ids: Ids
    values: Floats
    complete: npt.NDArray[np.bool_]


def pad(logits: Tensor) -> Tensor:
    """Logits, (rows, vocabulary), as fp32 with a width divisible by BLOCK. Left unchanged, and copied only if
    necessary.
    """
    rows, vocabulary = logits.shape
    width = -(-vocabulary // BLOCK) * BLOCK
    if width == vocabulary:
        return logits.detach().float().contiguous()
    padded = torch.full((rows, width), -torch.inf, device=logits.device)
    padded[:, :vocabulary] = logits.detach()
    return padded


def blocked(values: Tensor) -> Blocks:
    """Compute the maximum of every block. ``values`` come from ``pad``."""
    return Blocks(values, np.arange(len(values)), in_blocks(values).amax(dim=2).numpy(force=True))


def in_blocks(values: Tensor) -> Tensor:
    """(rows, width) as (rows, width / BLOCK, BLOCK)."""
    return values.view(values.shape[0], values.shape[1] // BLOCK, BLOCK)


def first_best(blocks: Blocks) -> Ids:
    """The lowest token id with the row's greatest value, (rows,)."""
    best = blocks.maxima.argmax(axis=1)
    inside = blocks.at(np.arange(len(best)), best).numpy(force=True)
    return np.asarray(best * BLOCK + inside.argmax(axis=1), dtype=np.int64)


def at_least(blocks: Blocks, least: Floats) -> tuple[Ids, Ids, Floats]:
    """All (row, token id, value) above -inf that reach the row's bound ``least``, (rows,), by row and id."""
    rows, numbers = np.nonzero((blocks.maxima >= least[:, None]) & (blocks.maxima > -np.inf))
    found = blocks.at(rows, numbers).numpy(force=True)
    inside, offsets = np.nonzero((found >= least[rows, None]) & (found > -np.inf))
    return rows[inside], numbers[inside] * BLOCK + offsets, found[inside, offsets]


def shortlist(blocks: Blocks, width: int) -> Listed:
    """At least the ``width`` best tokens of every row, and all that tie with the last of them.

    The list is complete if ``width`` reaches the number of blocks. Otherwise a row with too many ties gets an empty
    list.
    """
    count = blocks.maxima.shape[1]
    least = np.full(len(blocks.maxima), -np.inf, dtype=np.float32)
    if count > width:
        least = np.partition(blocks.maxima, count - width, axis=1)[:, count - width]
        reaching = ((blocks.maxima >= least[:, None]) & (blocks.maxima > -np.inf)).sum(axis=1)
        least[reaching > _CROWD * width] = np.inf
    return _listed(*at_least(blocks, least), least == -np.inf)


def _listed(rows: Ids, ids: Ids, values: Floats, complete: npt.NDArray[np.bool_]) -> Listed:
    """Sorted lists of tokens, from tokens in order of rows."""
    counts = np.bincount(rows, minlength=len(complete))
    places = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    keys = np.full((len(complete), max(1, counts.max(initial=0))), _LAST, dtype=np.int64)
    keys[rows, places] = pack(values, ids)
    keys.sort(axis=1)
    ids, values = _unpack(keys)
    missing = np.arange(keys.shape[1]) >= counts[:, None]
    ids[missing], values[missing] = 0, -np.inf
    return Listed(ids, values, complete)


def pack(values: Floats, ids: Ids) -> Ids:
    """Integers whose ascending order is falling value, ties by id."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # the sum turns -0 into 0
    rising = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return np.asarray((~rising << 32) | ids)


def _unpack(keys: Ids) -> tuple[Ids, Floats]:
    rising = ~(keys >> 32)
    bits = np.where(rising < 0, rising ^ 0x7FFFFFFF, rising).astype(np.int32)
    return keys & 0xFFFFFFFF, bits.view(np.float32)


# One unit of weight is 2**-40 of the most probable token's weight. So 2**22 tokens of full weight fit into an int64. A
# token of less than one unit is never drawn.
UNIT = 2.0**40
_SHORT_LIST = 128
_LONGER = 16
_TILE = 2**17  # numbers per tile on a CPU
_LEAST_LOG = -64.0  # far below any nonzero weight; avoids 0 times infinity

Settings = npt.NDArray[np.void]
_Cut = tuple[Ids, Ids, npt.NDArray[np.bool_]]  # token ids, weights, and rows with too short a list


class KeptTokens(NamedTuple):
    """Token ids in drawing order, (rows, longest list), and their weights, 0 for filtered tokens.

    ``places`` are the indices of the rows, (rows,).
    """

    places: Ids
    ids: Ids
    weights: Ids


def tiles(blocks: Blocks, best: Floats, settings: Settings) -> Iterator[tuple[slice, Tensor]]:
    """Yield logarithms of probabilities at the rows' temperatures, relative to the best token, some rows at a time.

    Tiles bound the memory of a step and fit the processor's cache. Each item is the slice of rows and a tensor
    (rows, width), fp32, which the caller may overwrite.
    """
    count, width = len(settings), blocks.values.shape[1]
    size = max(1, _TILE // width) if blocks.values.device.type == "cpu" else max(1, count)
    rows = torch.from_numpy(blocks.rows).to(blocks.values.device)
    for first in range(0, count, size):
        part = slice(first, min(count, first + size))
        yield part, _scale(blocks.values.index_select(0, rows[part]), best[part], settings[part])


def weigh(logs: Tensor, settings: Settings) -> Tensor:
    """Weights of the tokens that pass min-p, (rows, width), int64.

    Args:
        logs: from ``tiles``; overwritten.
    """
    exponential(logs)
    if settings["min_p"].any():
        logs.mul_(logs >= _column(settings["min_p"], logs))
    return logs.mul_(UNIT).long()


def block_sums(blocks: Blocks, best: Floats, settings: Settings) -> Ids:
    """The weight of every block, (rows, width / BLOCK)."""
    sums = np.empty(blocks.maxima.shape, dtype=np.int64)
    for part, logs in tiles(blocks, best, settings):
        sums[part] = in_blocks(weigh(logs, settings[part])).sum(dim=2).numpy(force=True)
    return sums


def block_weights(blocks: Blocks, best: Floats, settings: Settings, numbers: Ids) -> Ids:
    """The weights in one block per row, (rows, BLOCK)."""
    values = blocks.at(np.arange(len(numbers)), numbers)
    return np.asarray(weigh(_scale(values, best, settings), settings).numpy(force=True))


# The natural exponential of numbers from _LEAST_LOG to 0 as in Cephes (expf, to 2 units in the last place). The last
# bit of PyTorch's and numpy's own depends on the device and on the place in an array.
_WHOLE = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_FIRST, *_REST = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1


def exponential(logs: Tensor) -> Tensor:
    """The natural exponential of fp32 numbers from _LEAST_LOG to 0, in place. Every product and sum is rounded by
    itself.
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


def _scale(values: Tensor, best: Floats, settings: Settings) -> Tensor:
    return values.sub_(_column(best, values)).mul_(_column(settings["inverse"], values)).clamp_(min=_LEAST_LOG)


def ranked(blocks: Blocks, best: Floats, settings: Settings, totals: Ids) -> Iterator[KeptTokens]:
    """Apply top-k, then top-p, then typical-p. Tokens are by falling score, or the most typical first under typical-p.

    Args:
        totals: (rows,), the weight of all tokens that pass min-p, for rows without top-k.
    """

    def cut(listed: Listed, rows: Ids) -> _Cut:
        return _cut_ranked(listed, best[rows], settings[rows], totals[rows])

    return _lists(blocks, max(_SHORT_LIST, int(settings["top_k"].max(initial=0))), cut)


def typical(blocks: Blocks, best: Floats, settings: Settings) -> Iterator[KeptTokens]:
    """Apply typical-p alone, the most typical tokens first."""
    nearness = torch.empty(len(settings), blocks.values.shape[1], device=blocks.values.device)
    totals = np.empty(len(settings), dtype=np.int64)
    for part, logs in tiles(blocks, best, settings):
        weights = weigh(logs.clone(), settings[part])
        totals[part] = weights.sum(dim=1).numpy(force=True)
        moments = (weights.double() * -logs).long().sum(dim=1).numpy(force=True)
        near = logs.sub_(_column(_mean(moments, totals[part]), logs)).abs_().neg_()
        nearness[part] = near.masked_fill_(weights == 0, -torch.inf)

    def cut(listed: Listed, rows: Ids) -> _Cut:
        where = torch.from_numpy(blocks.rows[rows])[:, None], torch.from_numpy(listed.ids)
        scores = blocks.values[where[0].to(nearness.device), where[1].to(nearness.device)]
        found = weigh(_scale(scores, best[rows], settings[rows]), settings[rows]).numpy(force=True)
        found[listed.values == -np.inf] = 0
        share = settings["typical_p"][rows]
        lacking = (found.sum(axis=1) < share * totals[rows]) & ~listed.complete
        _keep_first(found, share, totals[rows], ties=listed.values)
        return listed.ids, found, lacking

    return _lists(blocked(nearness), _SHORT_LIST, cut)


def _lists(blocks: Blocks, width: int, cut: Callable[[Listed, Ids], _Cut]) -> Iterator[KeptTokens]:
    """Cut the rows' short lists, and retry with longer lists for rows that need them."""
    rows = np.arange(len(blocks.maxima))
    while len(rows):
        ids, weights, lacking = cut(shortlist(blocks.take(rows), width), rows)
        yield KeptTokens(rows[~lacking], ids[~lacking], weights[~lacking])
        rows, width = rows[lacking], _LONGER * width


def _cut_ranked(listed: Listed, best: Floats, settings: Settings, totals: Ids) -> _Cut:
    values, top_k, top_p = listed.values, settings["top_k"], settings["top_p"]
    logs = np.maximum((values - best[:, None]) * settings["inverse"][:, None], np.float32(_LEAST_LOG))
    weights = _weigh_listed(logs, settings)
    limited = top_k > 0
    last = np.clip(top_k, 1, values.shape[1]) - 1
    # Tokens that tie with the k-th are kept.
    weights[limited[:, None] & (values < values[np.arange(len(last)), last][:, None])] = 0
    mass = weights.sum(axis=1)
    totals = np.where(limited, mass, totals)
    lacking = np.where(limited, (values > -np.inf).sum(axis=1) < top_k, mass < top_p * totals) & ~listed.complete
    _keep_first(weights, top_p, totals)
    ids = listed.ids
    some = np.flatnonzero(settings["typical_p"] < 1)
    if len(some):
        ids[some], weights[some] = _typical_first(ids[some], logs[some], weights[some], settings["typical_p"][some])
    return ids, weights, lacking


def _typical_first(ids: Ids, logs: Floats, weights: Ids, share: npt.NDArray[np.float64]) -> tuple[Ids, Ids]:
    """Move each row's typical tokens to the front and give the others no weight."""
    totals = weights.sum(axis=1)
    moments = (weights.astype(np.float64) * -logs).astype(np.int64).sum(axis=1)
    nearness = -np.abs(logs - _mean(moments, totals)[:, None])
    nearness[weights == 0] = -np.inf
    order = np.argsort(pack(nearness, ids), axis=1)
    ids, weights, nearness = (np.take_along_axis(array, order, axis=1) for array in (ids, weights, nearness))
    _keep_first(weights, share, totals, ties=nearness)
    return ids, weights


def _keep_first(weights: Ids, share: npt.NDArray[np.float64], totals: Ids, ties: Floats | None = None) -> None:
    """Give weight 0 to all tokens behind the first ones that reach their share of the total.

    Args:
        ties: the values that order the rows. If given, tokens that tie with the last kept one stay too.
    """
    before = weights.cumsum(axis=1) - weights
    behind = (before >= (share * totals)[:, None]) & (share < 1)[:, None]
    if ties is not None:
        last = np.maximum((~behind & (weights > 0)).sum(axis=1), 1) - 1
        behind &= ties < ties[np.arange(len(last)), last][:, None]
    weights[behind] = 0


def _weigh_listed(logs: Floats, settings: Settings) -> Ids:
    """``weigh`` for lists."""
    ratios = exponential(torch.from_numpy(logs.copy())).numpy()
    ratios[ratios < settings["min_p"][:, None]] = 0
    return (ratios * np.float32(UNIT)).astype(np.int64)


def _mean(moments: Ids, totals: Ids) -> Floats:
    """The expected logarithm of a row's ratios: the negative entropy plus the logarithm of the total."""
    return np.asarray(-(moments / np.maximum(totals, 1)), dtype=np.float32)


def _column(numbers: Floats, like: Tensor) -> Tensor:
    """One number per row, as a column (rows, 1)."""
    return torch.from_numpy(np.ascontiguousarray(numbers))[:, None].to(like.device)
