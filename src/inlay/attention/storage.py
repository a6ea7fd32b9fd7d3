"""The memory of keys and values on the CPU: a key and a value tensor a layer.

Memory that was never written takes none: the operating system gives pages of an anonymous mapping on first write, so
a pool grows with use, up to its budget.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    def elements(self) -> int:
        """How many numbers the layer keeps of a token."""
        return (1 if self.shared else 2) * self.kv_heads * self.head_dim


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """How many bytes the keys and values of one token take in all layers."""
    return sum(layer.elements for layer in layers) * dtype.itemsize


class KVStorage:
    """``keys[layer]`` and ``values[layer]``, (kv_heads, slots, head_dim) each, in the KV dtype.

    Where a layer's values are its keys, both are the same tensor.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> None:
        self.dtype = dtype
        self.layers = tuple(layers)
        self.keys = [_untouched((layer.kv_heads, slots, layer.head_dim), dtype) for layer in layers]
        self.values = [
            keys if layer.shared else _untouched((layer.kv_heads, slots, layer.head_dim), dtype)
            for layer, keys in zip(layers, self.keys, strict=True)
        ]

    def write(self, layer: int, slots: SlotRange | npt.NDArray[np.int64], keys: Tensor, values: Tensor) -> None:
        """Store keys and values, (kv_heads, tokens, head_dim), at a range or at slot numbers (tokens,)."""
        where = slice(slots.first, slots.end) if isinstance(slots, SlotRange) else torch.from_numpy(slots)
        self.keys[layer][:, where] = keys.to(self.dtype)
        self.values[layer][:, where] = values.to(self.dtype)

    # What leaves the pool for another tier, and comes back. NumPy copies, on any thread, without PyTorch's threads,
    # which would take the cores from those that compute.

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> npt.NDArray[np.uint8]:
        """The bytes of keys and values in these slots: (2, kv_heads, tokens, head_dim × bytes of the dtype)."""
        shape = self.layers[layer]
        slab = np.empty((2, shape.kv_heads, total(slots), shape.head_dim * self.dtype.itemsize), np.uint8)
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

    def _bytes(self, layer: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        return self.keys[layer].view(torch.uint8).numpy(), self.values[layer].view(torch.uint8).numpy()


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written; torch.zeros would touch every page.

    Zeros, since a masked slot still enters a product with weight zero, where stray NaN would survive.
    """
    size = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)
