"""The memory of keys and values on a device, and their way to host memory and back.

Threads of the store copy segments while the device computes. Such a copy runs on a stream of its own, through pinned
host memory: it begins when what was put on the computing stream before it is done, so that it reads no half-written
slot and overwrites none that is still read; and whoever asked returns when it has ended, so that nothing uses slots
before they are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.storage import KVStorage, LayerShape
from inlay.errors import ParameterError
from inlay.slots import SlotRange, total


class DeviceStorage(KVStorage):
    """See KVStorage. device: where the tensors lie; "cpu" works as well, without streams.

    Raises ParameterError for int8, which no kernel here reads.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int, device: torch.device) -> None:
        if dtype == torch.int8:
            raise ParameterError(
                "kv_cache_dtype 'int8' is for attention on the CPU by 'cpu', 'torch' or 'reference'; use 'auto' here"
            )
        self.dtype = dtype
        self.layers = tuple(layers)
        self.device = device
        self.keys = [self._zeros(layer, slots) for layer in layers]
        self.values = [
            keys if layer.shared else self._zeros(layer, slots) for layer, keys in zip(layers, self.keys, strict=True)
        ]
        self._copying = local()  # a stream for each thread that copies

    def write(self, layer: int, slots: SlotRange | npt.NDArray[np.int64], keys: Tensor, values: Tensor) -> None:
        """See KVStorage.write."""
        if isinstance(slots, SlotRange):
            where: slice | Tensor = slice(slots.first, slots.end)
        else:
            where = torch.from_numpy(slots).to(self.device, non_blocking=True)
        self.keys[layer][:, where] = keys.to(self.device, self.dtype)
        self.values[layer][:, where] = values.to(self.device, self.dtype)

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> npt.NDArray[np.uint8]:
        """See KVStorage.read_slab."""
        slab = self._host(layer, total(slots))
        with self._beside():
            for which, memory in enumerate((self.keys[layer], self.values[layer])):
                at = 0
                for run in slots:
                    part = memory[:, run.first : run.end]
                    slab[which, :, at : at + run.length].copy_(part, non_blocking=True)
                    at += run.length
        return _bytes(slab)

    def write_slab(self, layer: int, slots: Sequence[SlotRange], slab: npt.NDArray[np.uint8]) -> None:
        """See KVStorage.write_slab."""
        assert slab.shape[2] == total(slots), "one token for each slot"
        host = self._host(layer, total(slots))
        _bytes(host)[:] = slab
        with self._beside():
            for which, memory in enumerate((self.keys[layer], self.values[layer])):
                at = 0
                for run in slots:
                    part = host[which, :, at : at + run.length]
                    memory[:, run.first : run.end].copy_(part, non_blocking=True)
                    at += run.length

    def _zeros(self, layer: LayerShape, slots: int) -> Tensor:
        return torch.zeros((layer.kv_heads, slots, layer.head_dim), dtype=self.dtype, device=self.device)

    def _host(self, layer: int, tokens: int) -> Tensor:
        """Host memory for the keys and values of so many tokens, pinned where the device can copy to it by itself."""
        shape = self.layers[layer]
        return torch.empty(
            (2, shape.kv_heads, tokens, shape.head_dim), dtype=self.dtype, pin_memory=self.device.type == "cuda"
        )

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What runs within it runs beside the computation, behind what that has been given, and has ended with it."""
        if self.device.type != "cuda":
            yield
            return
        if not hasattr(self._copying, "stream"):
            self._copying.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._copying.stream
        stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return np.asarray(tensor.view(torch.uint8).numpy())
