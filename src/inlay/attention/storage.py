"""The memory of keys and values on the CPU: a key and a value tensor a layer.

In int8 the key, or value, of a token and head is a row of whole numbers, -127 to 127, with the fp32 behind them that 1
stands for: a scale for each token and head, as tokens come one by one. In fp8 there are scales too, on devices alone.

Memory that was never written takes none: the operating system gives pages of an anonymous mapping on first write, so
a pool grows with use, up to its budget.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.quantization import LARGEST, SCALE_BYTES, dequantize, quantize
from inlay.errors import ParameterError
from inlay.slots import SlotRange, total


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of keys and values in one layer, and their width.

    shared: whether the values are the keys themselves, stored once (latent attention).
    """

    kv_heads: int
    head_dim: int
    shared: bool = False

    @property
    def rows(self) -> int:
        """How many vectors of ``head_dim`` the layer keeps of a token."""
        return (1 if self.shared else 2) * self.kv_heads

    @property
    def elements(self) -> int:
        """How many numbers the layer keeps of a token."""
        return self.rows * self.head_dim


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """How many elements of the dtype a key of ``head_dim`` numbers has, with its scale."""
    return head_dim + (SCALE_BYTES if dtype in LARGEST else 0)


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """How many bytes the keys and values of one token take in all layers."""
    return sum(layer.rows * row_width(layer.head_dim, dtype) for layer in layers) * dtype.itemsize


def quantized(numbers: Tensor) -> Tensor:  # (…, head_dim + SCALE_BYTES) int8
    """Rows of numbers, (…, head_dim), as int8 with their scales, to nearest, ties to even: the largest becomes 127.

    What is no number leaves a scale that is none. The kernel does the same, bit for bit (csrc/attend.cpp).
    """
    whole, scale = quantize(numbers, torch.int8)
    return torch.cat((whole, scale[..., None].view(torch.int8)), -1)


def dequantized(rows: Tensor) -> Tensor:  # (…, head_dim) fp32
    """The numbers of rows of int8, (…, head_dim + SCALE_BYTES)."""
    head_dim = rows.shape[-1] - SCALE_BYTES
    return dequantize(rows[..., :head_dim], rows[..., head_dim:].contiguous().view(torch.float32)[..., 0])


class KVStorage:
    """``keys[layer]`` and ``values[layer]``, (kv_heads, slots, head_dim) each, in the KV dtype; of int8 with scales.

    Where a layer's values are its keys, both are the same tensor. dtype: float32, bfloat16 or int8.
    Raises ParameterError for fp8.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> None:
        if dtype == torch.float8_e4m3fn:
            raise ParameterError("kv_cache_dtype 'fp8' is for GPUs, and this is a CPU; use 'int8', which takes as much")
        self.dtype = dtype
        self.layers = tuple(layers)
        shapes = [(layer.kv_heads, slots, row_width(layer.head_dim, dtype)) for layer in layers]
        self.keys = [_untouched(shape, dtype) for shape in shapes]
        self.values = [
            keys if layer.shared else _untouched(shape, dtype)
            for layer, shape, keys in zip(layers, shapes, self.keys, strict=True)
        ]

    def write(self, layer: int, slots: SlotRange | npt.NDArray[np.int64], keys: Tensor, values: Tensor) -> None:
        """Store keys and values, (kv_heads, tokens, head_dim), at a range or at slot numbers (tokens,)."""
        where = slice(slots.first, slots.end) if isinstance(slots, SlotRange) else torch.from_numpy(slots)
        self.keys[layer][:, where] = self._stored(keys)
        self.values[layer][:, where] = self._stored(values)

    def read_keys(self, layer: int, slots: slice | Tensor) -> Tensor:
        """The keys in these slots, (kv_heads, tokens, head_dim): in the KV dtype, of int8 in fp32."""
        return self._read(self.keys[layer][:, slots])

    def read_values(self, layer: int, slots: slice | Tensor) -> Tensor:
        """The values in these slots; see ``read_keys``."""
        return self._read(self.values[layer][:, slots])

    def _stored(self, numbers: Tensor) -> Tensor:
        return quantized(numbers) if self.dtype == torch.int8 else numbers.to(self.dtype)

    def _read(self, rows: Tensor) -> Tensor:
        return dequantized(rows) if self.dtype == torch.int8 else rows

    # What leaves the pool for another tier, and comes back. NumPy copies, on any thread, without PyTorch's threads,
    # which would take the cores from those that compute.

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> npt.NDArray[np.uint8]:
        """The bytes of keys and values in these slots, scales included: (2, kv_heads, tokens, bytes of a head)."""
        shape = self.layers[layer]
        width = row_width(shape.head_dim, self.dtype) * self.dtype.itemsize
        slab = np.empty((2, shape.kv_heads, total(slots), width), np.uint8)
        for which, memory in enumerate(self._bytes(layer)):
            at = 0
            for run in slots:
                slab[which, :, at : at + run.length] = memory[:, run.first : run.end]
                at += run.length
        return slab

    def write_slab(self, layer: int, slots: Sequence[SlotRange], slab: npt.NDArray[np.uint8]) -> None:
        """Put the bytes of keys and values, as ``read_slab`` gives them, into these slots."""
        assert slab.shape[2] == total(slots), "one token for each slot"
        for which, memory in enumerate(self._bytes(layer)):
            at = 0
            for run in slots:
                memory[:, run.first : run.end] = slab[which, :, at : at + run.length]
                at += run.length

    def beside(self) -> AbstractContextManager[None]:
        """What is put within it is put beside the computation, and has been put with its end."""
        return nullcontext()

    def put_slab(self, layer: int, slots: Sequence[SlotRange], slab: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """As ``write_slab``, within ``beside``. Returns what lets the computation that is begun next see these bytes.

        ``slab`` may not change before ``beside`` ends.
        """
        self.write_slab(layer, slots, slab)
        return seen

    def _bytes(self, layer: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        return self.keys[layer].view(torch.uint8).numpy(), self.values[layer].view(torch.uint8).numpy()


def seen() -> None:
    """What has been put is there for everybody."""


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written; torch.zeros would touch every page.

    Zeros, since a masked slot still enters a product with weight zero, where stray NaN would survive.
    """
    size = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)
