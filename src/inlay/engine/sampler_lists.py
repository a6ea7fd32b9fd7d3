"""The most probable tokens of many rows at once, without sorting vocabularies.

A row's greatest value in every block of 32 columns takes one pass over memory. The width-th greatest of these is a
bound: at least ``width`` tokens reach it, so all tokens that reach it are the row's best, ties included, and they stand
in the few blocks whose greatest value reaches it. Order among them is by value, falling, and by token id where values
tie: value and id are packed into one integer, so that one sort gives both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.engine.sampler_row import Ids

BLOCK = 32
_CROWD = 4  # a row with this many times the blocks asked for has ties without end: it would widen the others' lists
_LAST = np.iinfo(np.int64).max

Floats = npt.NDArray[np.float32]


class Blocks(NamedTuple):
    """Rows of values in blocks of columns.

    values: (all rows, width), fp32; width is a multiple of BLOCK, -inf stands where there is no token.
    rows: which rows of them these are, (rows,).
    maxima: (rows, width / BLOCK), every block's greatest value; NaN where the block holds one.
    """

    values: Tensor
    rows: Ids
    maxima: Floats

    def take(self, rows: Ids) -> Blocks:
        """Some of the rows; nothing but the maxima is copied."""
        return Blocks(self.values, self.rows[rows], self.maxima[rows])

    def at(self, rows: Ids, numbers: Ids) -> Tensor:
        """The values of some blocks, (blocks, BLOCK), by row and by number of the block."""
        device = self.values.device
        where = torch.from_numpy(self.rows[rows]).to(device), torch.from_numpy(numbers).to(device)
        return in_blocks(self.values)[where]


class Listed(NamedTuple):
    """The best tokens of every row, in order, filled up with -inf.

    ids, values: (rows, longest list).
    complete: (rows,), whether the list holds every token that has a value at all.
    """

    ids: Ids
    values: Floats
    complete: npt.NDArray[np.bool_]


def pad(logits: Tensor) -> Tensor:
    """Logits, (rows, vocabulary), as fp32 of a width that blocks divide; left unchanged, and copied only if need be."""
    rows, vocabulary = logits.shape
    width = -(-vocabulary // BLOCK) * BLOCK
    if width == vocabulary:
        return logits.detach().float().contiguous()
    padded = torch.full((rows, width), -torch.inf, device=logits.device)
    padded[:, :vocabulary] = logits.detach()
    return padded


def blocked(values: Tensor) -> Blocks:
    """Find every block's greatest value. values: as ``pad`` gives them."""
    return Blocks(values, np.arange(len(values)), in_blocks(values).amax(dim=2).numpy(force=True))


def in_blocks(values: Tensor) -> Tensor:
    """(rows, width) as (rows, width / BLOCK, BLOCK)."""
    return values.view(values.shape[0], values.shape[1] // BLOCK, BLOCK)


def first_best(blocks: Blocks) -> Ids:
    """Every row's greatest value's lowest token id, (rows,)."""
    best = blocks.maxima.argmax(axis=1)
    inside = blocks.at(np.arange(len(best)), best).numpy(force=True)
    return np.asarray(best * BLOCK + inside.argmax(axis=1), dtype=np.int64)


def at_least(blocks: Blocks, least: Floats) -> tuple[Ids, Ids, Floats]:
    """All (row, token id, value) with a value of at least the row's bound, (rows,), and above -inf, by row and id."""
    rows, numbers = np.nonzero((blocks.maxima >= least[:, None]) & (blocks.maxima > -np.inf))
    found = blocks.at(rows, numbers).numpy(force=True)
    inside, offsets = np.nonzero((found >= least[rows, None]) & (found > -np.inf))
    return rows[inside], numbers[inside] * BLOCK + offsets, found[inside, offsets]


def shortlist(blocks: Blocks, width: int) -> Listed:
    """At least every row's ``width`` best tokens, and all that tie with the last of them.

    The list is complete where ``width`` reaches the number of blocks. Below that, a row in which ties have no end gets
    an empty one.
    """
    count = blocks.maxima.shape[1]
    least = np.full(len(blocks.maxima), -np.inf, dtype=np.float32)
    if count > width:
        least = np.partition(blocks.maxima, count - width, axis=1)[:, count - width]
        reaching = ((blocks.maxima >= least[:, None]) & (blocks.maxima > -np.inf)).sum(axis=1)
        least[reaching > _CROWD * width] = np.inf
    return _listed(*at_least(blocks, least), least == -np.inf)


def _listed(rows: Ids, ids: Ids, values: Floats, complete: npt.NDArray[np.bool_]) -> Listed:
    """Lists of tokens that come in order of rows, each list sorted."""
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
    """Integers that rise where values fall, and with the id where values tie."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # the sum turns -0 into 0
    rising = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return np.asarray((~rising << 32) | ids)


def _unpack(keys: Ids) -> tuple[Ids, Floats]:
    rising = ~(keys >> 32)
    bits = np.where(rising < 0, rising ^ 0x7FFFFFFF, rising).astype(np.int32)
    return keys & 0xFFFFFFFF, bits.view(np.float32)
