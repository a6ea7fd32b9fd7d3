"""Chooses tokens with the compiled kernel (csrc/choose.inl). This file prepares its inputs.

The kernel adjusts, filters and draws as specified by row.py and plain.py, and chooses the same tokens. It
reads a row from memory once; later passes hit the processor's cache. Rows run in parallel on PyTorch's threads, without
Python's lock. The kernel does not support typical-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.kernel import kernel
from inlay.sampling.plain import Bits
from inlay.sampling.row import SETTINGS, Ids, Row
from inlay.sampling.structured import allowed_bits

Floats = npt.NDArray[np.float32]

_DTYPES = (torch.float32, torch.bfloat16)
_NO_BITS = np.zeros((0, 0), dtype=np.uint32)


class Chosen(NamedTuple):
    """A token for every row.

    Attributes:
        tokens: (rows,); meaningless where ``best`` is not finite.
        raw, best: (rows,), the greatest logit before and after adjustment; NaN if the row contains one.
    """

    tokens: Ids
    raw: Floats
    best: Floats


def takes(logits: Tensor) -> bool:
    """True if the kernel was built and supports these logits, (rows, vocabulary)."""
    return kernel is not None and logits.device.type == "cpu" and logits.dtype in _DTYPES


def random_bits(rows: Sequence[Row]) -> Bits:
    """64 random bits for the next token of each row, (rows,)."""
    bits = np.empty(len(rows), dtype=np.uint64)
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    kernel.philox(seeds, np.array([row.step for row in rows], dtype=np.uint64), bits)
    return bits


def choose(logits: Tensor, rows: Sequence[Row], draws: Bits, instruction_set: str = "") -> Chosen:
    """Choose one token per row, without typical-p.

    Args:
        logits: (rows, vocabulary), left unchanged; see ``takes``.
        draws: (rows,), 64 random bits each.
        instruction_set: see CpuBackend; empty for the best one that runs here.
    """
    logits = logits.detach()
    if logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]:
        logits = logits.contiguous()
    count = len(rows)
    settings = np.array([row.settings for row in rows], dtype=SETTINGS)
    found = Chosen(np.empty(count, np.int64), np.empty(count, np.float32), np.empty(count, np.float32))
    kernel.choose(
        logits.data_ptr(), logits.dtype == torch.bfloat16, logits.stride(0), draws,
        *(np.ascontiguousarray(settings[name]) for name in ("inverse", "min_p", "top_k", "top_p")),
        np.stack([settings[name] for name in ("repetition", "frequency", "presence")], axis=1),
        *_lists([row.forbidden for row in rows]),
        *_lists([row.rules.bias_ids for row in rows]), _joined([row.rules.biases for row in rows], np.float32),
        *_lists([row.seen.ids for row in rows if row.seen], [row.seen is not None for row in rows]),
        _joined([row.seen.counts for row in rows if row.seen], np.float32),
        *_guided(rows, logits.shape[1]), logits.shape[1], *found, instruction_set, torch.get_num_threads(),
    )  # fmt: skip
    return found


def _lists(ids: Sequence[Ids], has: Sequence[bool] | None = None) -> tuple[Ids, Ids]:
    """Return where each row's token ids begin, (rows + 1,), and all ids in one array.

    Args:
        ids: the lists of the rows that have one.
        has: True for the rows with a list.
    """
    count = len(ids) if has is None else len(has)
    first = np.zeros(count + 1, dtype=np.int64)
    if any(map(len, ids)):
        lengths = iter(map(len, ids))
        np.cumsum([next(lengths) if has is None or has[row] else 0 for row in range(count)], out=first[1:])
    return first, _joined(ids, np.int64)


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if any(map(len, arrays)) else np.empty(0, dtype=dtype)


def _guided(rows: Sequence[Row], vocabulary: int) -> tuple[Ids, npt.NDArray[np.uint32]]:
    """Each row's index among the rows with limited tokens, or -1, and the allowed tokens, one bit each."""
    held = [place for place, row in enumerate(rows) if row.guide is not None or row.rules.allowed is not None]
    guided = np.full(len(rows), -1, dtype=np.int64)
    if not held:
        return guided, _NO_BITS
    guided[held] = np.arange(len(held))
    bits = np.full((len(held), -(-vocabulary // 32)), 0xFFFFFFFF, dtype=np.uint32)
    guides = [row.guide for row in rows if row.guide is not None]
    if guides:
        bits[[at for at, place in enumerate(held) if rows[place].guide is not None]] = allowed_bits(guides, vocabulary)
    for at, place in enumerate(held):
        if (rules := rows[place].rules).allowed is not None:
            bits[at] &= rules.allowed_bits(bits.shape[1])
    return guided, bits
