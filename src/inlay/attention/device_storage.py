"""The KV pool on a device, and its copies to host memory and back.

Threads of the store copy segments while the device computes. A copy runs on its own stream, through pinned host
memory. It starts after the work that is already queued on the computing stream, so it reads no half-written slot and
overwrites no slot that is still read. The calling thread returns when the copy has ended, so no slot is used too
early. In a layer-by-layer upload (``put_slab``), an event follows each layer. The computing stream waits for that
event before it reads the layer, and the host waits only for the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.storage import LARGEST, SCALE_BYTES, KVStorage, LayerShape, dequantize, quantize, seen
from inlay.slots import SlotRange, total

logger = logging.getLogger(__name__)

#: Scales of the keys and of the values of one layer, (kv_heads, slots) fp32 each.
Scales = tuple[Tensor, Tensor]


class DeviceStorage(KVStorage):
    """A KVStorage on a device.

    In 8 bits (int8, float8_e4m3fn), scales are kept in tensors of their own, because rows with a scale would be
    misaligned. In slabs, a scale follows the numbers of its row.

    Args:
        device: Device of the tensors. "cpu" works too, without streams.

    Attributes:
        scales: The scales of each layer, or None without quantization.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int, device: torch.device) -> None:
        self.dtype = dtype
        self.layers = tuple(layers)
        self.device = device
        self.keys = [self._zeros(layer, slots) for layer in layers]
        self.values = [
            keys if layer.shared else self._zeros(layer, slots) for layer, keys in zip(layers, self.keys, strict=True)
        ]
        self.scales = [self._scales(layer, slots) if dtype in LARGEST else None for layer in layers]
        self._copying = local()  # one stream for each thread that copies

    def write(self, layer: int, slots: SlotRange | npt.NDArray[np.int64], keys: Tensor, values: Tensor) -> None:
        """See KVStorage.write."""
        if isinstance(slots, SlotRange):
            where: slice | Tensor = slice(slots.first, slots.end)
        else:
            where = torch.from_numpy(slots).to(self.device, non_blocking=True)
        scales = self.scales[layer]
        if scales is None:
            self.keys[layer][:, where] = keys.to(self.device, self.dtype)
            self.values[layer][:, where] = values.to(self.device, self.dtype)
            return
        for memory, scale, numbers in zip((self.keys[layer], self.values[layer]), scales, (keys, values), strict=True):
            narrow, scale[:, where] = quantize(numbers.to(self.device), self.dtype)
            memory.view(torch.uint8)[:, where] = narrow.view(torch.uint8)  # PyTorch lacks some operations for fp8

    def read_keys(self, layer: int, slots: slice | Tensor) -> Tensor:
        """See KVStorage.read_keys."""
        return self._numbers(self.keys[layer], self.scales[layer], 0, slots)

    def read_values(self, layer: int, slots: slice | Tensor) -> Tensor:
        """See KVStorage.read_values."""
        return self._numbers(self.values[layer], self.scales[layer], 1, slots)

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> npt.NDArray[np.uint8]:
        """See KVStorage.read_slab."""
        slabs = self.staging(layer, total(slots))
        with self.beside():
            for there, slab in zip(self._memory(layer), slabs, strict=True):
                for which, memory in enumerate(there):
                    at = 0
                    for run in slots:
                        part = memory[:, run.first : run.end]
                        slab[which, :, at : at + run.length].copy_(part, non_blocking=True)
                        at += run.length
        return np.concatenate([_bytes(slab) for slab in slabs], axis=3) if len(slabs) > 1 else _bytes(slabs[0])

    def write_slab(self, layer: int, slots: Sequence[SlotRange], slab: npt.NDArray[np.uint8]) -> None:
        """See KVStorage.write_slab."""
        with self.beside():
            self.put_slab(layer, slots, slab)

    def put_slab(self, layer: int, slots: Sequence[SlotRange], slab: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """See KVStorage.put_slab. A slab outside locked or contiguous memory is staged through pinned memory, and
        waited for.
        """
        assert slab.shape[2] == total(slots), "one token for each slot"
        locked = self._locked(layer, slab)
        slabs = locked or []
        if locked is None:
            slabs = self.staging(layer, total(slots))
            _bytes(slabs[0])[:] = slab[..., : _bytes(slabs[0]).shape[3]]
            for host in slabs[1:]:
                _bytes(host)[:] = slab[..., -SCALE_BYTES:]
        for there, host in zip(self._memory(layer), slabs, strict=True):
            for which, memory in enumerate(there):
                at = 0
                for run in slots:
                    part = host[which, :, at : at + run.length]
                    memory[:, run.first : run.end].copy_(part, non_blocking=True)
                    at += run.length
        if self.device.type != "cuda":
            return seen
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        if locked is None:
            event.synchronize()
        return lambda: torch.cuda.default_stream(self.device).wait_event(event)

    def lock(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        """Lock host memory in place, so that the device can copy from it directly.

        Returns:
            A function that unlocks the memory. None if it cannot be locked; copies then go through pinned staging
            memory.
        """
        if self.device.type != "cuda":
            return None
        cuda, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            failed = int(cuda.cudaHostRegister(address, memory.nbytes, 0))
        if failed:
            logger.warning(
                "%d MiB of host memory cannot be locked for %s (CUDA error %d): copies take longer",
                memory.nbytes >> 20,
                self.device,
                failed,
            )
            return None
        return lambda: cuda.cudaHostUnregister(address)

    def _locked(self, layer: int, slab: npt.NDArray[np.uint8]) -> list[Tensor] | None:
        """The slab in the layout of ``staging``, without a copy. None unless it is locked, contiguous and has no
        scales.
        """
        if self.device.type != "cuda" or self.scales[layer] is not None or not slab.flags.c_contiguous:
            return None
        tensor = torch.from_numpy(slab)
        return [tensor.view(self.dtype)] if tensor.is_pinned() else None

    def _numbers(self, memory: Tensor, scales: Scales | None, which: int, slots: slice | Tensor) -> Tensor:
        """which: 0 for keys, 1 for values."""
        if scales is None:
            return memory[:, slots]
        return dequantize(memory.view(torch.uint8)[:, slots].view(self.dtype), scales[which][:, slots])

    def _memory(self, layer: int) -> list[Scales]:
        """The keys and values of a layer, (kv_heads, slots, width) each, and their scales if there are any."""
        scales = self.scales[layer]
        found = [(self.keys[layer], self.values[layer])]
        return found if scales is None else [*found, (scales[0][..., None], scales[1][..., None])]

    def _scales(self, layer: LayerShape, slots: int) -> Scales:
        keys, values = (torch.zeros((layer.kv_heads, slots), device=self.device) for _ in range(2))
        return (keys, keys) if layer.shared else (keys, values)

    def _zeros(self, layer: LayerShape, slots: int) -> Tensor:
        return torch.zeros((layer.kv_heads, slots, layer.head_dim), dtype=self.dtype, device=self.device)

    def staging(self, layer: int, tokens: int) -> list[Tensor]:
        """Allocate host memory for ``tokens`` tokens in the layout of ``_memory``. It is pinned on CUDA devices."""
        return [
            torch.empty(
                (2, self.layers[layer].kv_heads, tokens, keys.shape[2]),
                dtype=keys.dtype,
                pin_memory=self.device.type == "cuda",
            )
            for keys, _ in self._memory(layer)
        ]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context whose copies run on this thread's stream, after the work queued so far. They have ended when it
        exits.
        """
        if self.device.type != "cuda":
            yield
            return
        if not hasattr(self._copying, "stream"):
            self._copying.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._copying.stream
        stream.wait_stream(torch.cuda.default_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return np.asarray(tensor.view(torch.uint8).numpy())
