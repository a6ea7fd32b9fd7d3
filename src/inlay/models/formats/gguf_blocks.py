"""Weights in llama.cpp's blocks. Types with 4 bits and a scale for 32 weights map to inlay's grid bit for bit.

ggml-common.h defines the layout of each block. ``gguf.quants`` unpacks the other types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from inlay.models.formats.stored import Grid, GridWeight, StoredWeight

#: Common quantized types that ``gguf.quants`` unpacks.
NARROW = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"),
)


class BlockWeight(StoredWeight):
    """A weight in blocks outside inlay's grid.

    Args:
        blocks: (out_features, bytes of a row), uint8.
        kind: the type of the blocks, a ``gguf.GGMLQuantizationType``.
    """

    def __init__(self, blocks: Tensor, kind: Any) -> None:
        from gguf import GGML_QUANT_SIZES

        self._blocks, self._kind = blocks, kind
        weights, size = GGML_QUANT_SIZES[kind]
        self._block = size
        self.shape = (blocks.shape[0], blocks.shape[1] // size * weights)

    def tensors(self) -> Mapping[str, Tensor]:
        return {self._kind.name: self._blocks}

    def dense(self, first: int, last: int) -> Tensor:
        from gguf import dequantize

        return torch.from_numpy(dequantize(self._blocks[first:last].numpy(), self._kind))


class GridBlocks(BlockWeight, GridWeight):
    """A weight in blocks on inlay's grid."""

    def __init__(self, blocks: Tensor, kind: Any) -> None:
        super().__init__(blocks, kind)
        self.symmetric = kind.name == "Q4_0"

    def grid(self, first: int, last: int) -> Grid:
        rows = self._blocks[first:last]
        blocks = rows.reshape(-1, self._block)
        return Grid(*(tensor.reshape(len(rows), -1) for tensor in _GRIDS[self._kind.name](blocks)))

    def dense(self, first: int, last: int) -> Tensor:
        return self.grid(first, last).dense()


def stored_blocks(blocks: Tensor, kind: Any) -> StoredWeight:
    """Return the weight in blocks of a type in ``NARROW``. Arguments as for ``BlockWeight``."""
    return (GridBlocks if kind.name in _GRIDS else BlockWeight)(blocks, kind)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack a scale and 32 numbers around 8."""
    scale = _half(blocks, 0)
    return _halves(blocks[:, 2:18]), scale, torch.zeros_like(scale)


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack a scale, the smallest weight, and 32 numbers from there on."""
    scale, least = _half(blocks, 0), _half(blocks, 2)
    return _halves(blocks[:, 4:20]), scale, least + 8 * scale


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack eight groups of 32 numbers. Their scales and offsets have 6 bits and a common scale each."""
    packed = blocks[:, 4:16]
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), 1)
    offs = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), 1)
    scale = _half(blocks, 0) * scales
    numbers = blocks[:, 16:].reshape(-1, 4, 32)
    return torch.stack((numbers & 15, numbers >> 4), 2), scale, 8 * scale - _half(blocks, 2) * offs


def _half(blocks: Tensor, at: int) -> Tensor:
    """Read an fp16 number at a byte of each block, as (blocks, 1), fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(numbers: Tensor) -> Tensor:
    """Unpack the lower halves of 16 bytes, then the upper ones: (blocks, 32)."""
    return torch.cat((numbers & 15, numbers >> 4), 1)


_GRIDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
