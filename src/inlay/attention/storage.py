"""The KV pool on the CPU: one key tensor and one value tensor for each layer.

In int8, the key (or value) of a token and head is a row of integers from -127 to 127, followed by one fp32 scale.
Each token and head has its own scale, because tokens arrive one by one. fp8 exists only on other devices.

Memory that was never written takes no RAM: the operating system allocates pages of an anonymous mapping on the first
write. So a pool grows with use, up to its budget.

``DeviceStorage`` is the KV pool on a device, with its copies to host memory and back. Threads of the store copy
segments while the device computes. A copy runs on its own stream, through pinned host memory. It starts after the work
that is already queued on the computing stream, so it reads no half-written slot and overwrites no slot that is still
read. The calling thread returns when the copy has ended, so no slot is used too early. In a layer-by-layer upload
(``put_slab``), an event follows each layer. The computing stream waits for that event before it reads the layer, and
the host waits only for the last one.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import local

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.errors import ParameterError
from inlay.slots import SlotRange, total

#: The dtypes by their names in settings and segments.
NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

#: The number that the largest magnitude of a row is scaled to. For fp8 it is the largest number of the format.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

#: Bytes of the fp32 scale. It follows the numbers of a row in slabs, and in the int8 pool of the CPU.
SCALE_BYTES = 4

_LEAST = 1e-30  # rows whose largest magnitude is not above this become zero, since their factor would be infinite


def quantize(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows of numbers, (…, head_dim), to 8 bits. Rounds to nearest, ties to even.

    A row with a NaN or infinity gets a NaN scale. The Triton kernel ``store`` does the same.

    Returns:
        The numbers in ``dtype``, and their scales, (…,), fp32.
    """
    exact, largest = numbers.float(), LARGEST[dtype]
    most = exact.abs().amax(-1, keepdim=True)
    finite, some = most <= torch.finfo(torch.float32).max, most > _LEAST
    factor = torch.where(finite & some, most.reciprocal() * largest, 0.0)
    small = torch.where(finite, exact * factor, 0.0)
    scale = torch.where(finite, torch.where(some, most / largest, 0.0), torch.nan)
    return (small.round() if dtype == torch.int8 else small).to(dtype), scale[..., 0]


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of quantized rows, (…, head_dim), in fp32. scales: (…,)."""
    return numbers.float() * scales[..., None]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV shape of one layer.

    Args:
        kv_heads: Number of heads of keys and values.
        head_dim: Elements of a head.
        shared: True if the values are the keys themselves and are stored once (latent attention).
    """

    kv_heads: int
    head_dim: int
    shared: bool = False

    @property
    def rows(self) -> int:
        """The number of vectors of ``head_dim`` that the layer stores for a token."""
        return (1 if self.shared else 2) * self.kv_heads

    @property
    def elements(self) -> int:
        """The number of elements that the layer stores for a token."""
        return self.rows * self.head_dim


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the stored width of one head's key in elements of ``dtype``, scale included."""
    return head_dim + (SCALE_BYTES if dtype in LARGEST else 0)


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Return the bytes that keys and values of one token take in all layers."""
    return sum(layer.rows * row_width(layer.head_dim, dtype) for layer in layers) * dtype.itemsize


def quantized(numbers: Tensor) -> Tensor:  # (…, head_dim + SCALE_BYTES) int8
    """Quantize rows of numbers, (…, head_dim), to int8 followed by their scales.

    Rounds to nearest, ties to even. The largest magnitude of a row becomes 127. A row with a NaN or infinity gets a NaN
    scale. The compiled kernel does the same, bit for bit (csrc/attend.cpp).
    """
    whole, scale = quantize(numbers, torch.int8)
    return torch.cat((whole, scale[..., None].view(torch.int8)), -1)


def dequantized(rows: Tensor) -> Tensor:  # (…, head_dim) fp32
    """Return the numbers of int8 rows, (…, head_dim + SCALE_BYTES)."""
    head_dim = rows.shape[-1] - SCALE_BYTES
    return dequantize(rows[..., :head_dim], rows[..., head_dim:].contiguous().view(torch.float32)[..., 0])


class KVStorage:
    """``keys[layer]`` and ``values[layer]``, (kv_heads, slots, row width) each, in the KV dtype.

    The row width is ``head_dim``, plus the scale for int8. If a layer's values are its keys, both are the same tensor.

    Args:
        layers: The shape of each layer.
        dtype: float32, bfloat16 or int8.
        slots: Number of token slots.

    Raises:
        ParameterError: For fp8.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> None:
        if dtype == torch.float8_e4m3fn:
            raise ParameterError(
                "kv_cache_dtype 'fp8' is for GPUs, and this is a CPU; use 'int8', which takes as much",
                code="parameter.unavailable_dtype",
            )
        self.dtype = dtype
        self.layers = tuple(layers)
        shapes = [(layer.kv_heads, slots, row_width(layer.head_dim, dtype)) for layer in layers]
        self.keys = [_untouched(shape, dtype) for shape in shapes]
        self.values = [
            keys if layer.shared else _untouched(shape, dtype)
            for layer, shape, keys in zip(layers, shapes, self.keys, strict=True)
        ]

    def write(self, layer: int, slots: SlotRange | npt.NDArray[np.int64], keys: Tensor, values: Tensor) -> None:
        """Store keys and values, (kv_heads, tokens, head_dim), in a range of slots or at slot numbers (tokens,)."""
        where = slice(slots.first, slots.end) if isinstance(slots, SlotRange) else torch.from_numpy(slots)
        self.keys[layer][:, where] = self._stored(keys)
        self.values[layer][:, where] = self._stored(values)

    def read_keys(self, layer: int, slots: slice | Tensor) -> Tensor:
        """Return the keys in these slots, (kv_heads, tokens, head_dim), in the KV dtype. int8 keys are returned in
        fp32.
        """
        return self._read(self.keys[layer][:, slots])

    def read_values(self, layer: int, slots: slice | Tensor) -> Tensor:
        """Return the values in these slots; see ``read_keys``."""
        return self._read(self.values[layer][:, slots])

    def _stored(self, numbers: Tensor) -> Tensor:
        return quantized(numbers) if self.dtype == torch.int8 else numbers.to(self.dtype)

    def _read(self, rows: Tensor) -> Tensor:
        return dequantized(rows) if self.dtype == torch.int8 else rows

    # Slabs move between the pool and other tiers. NumPy copies them on the calling thread: PyTorch's threads would take
    # cores from the computation.

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> npt.NDArray[np.uint8]:
        """Return the bytes of keys and values in these slots: (2, kv_heads, tokens, bytes of a head), scales
        included.
        """
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
        """Write bytes, in the layout of ``read_slab``, into these slots."""
        assert slab.shape[2] == total(slots), "one token for each slot"
        for which, memory in enumerate(self._bytes(layer)):
            at = 0
            for run in slots:
                memory[:, run.first : run.end] = slab[which, :, at : at + run.length]
                at += run.length

    def beside(self) -> AbstractContextManager[None]:
        """Context in which copies run beside the computation. They are complete when it exits."""
        return nullcontext()

    def put_slab(self, layer: int, slots: Sequence[SlotRange], slab: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Like ``write_slab``, but called within ``beside``. ``slab`` must not change before ``beside`` exits.

        Returns:
            A function to call before the next computation that reads these slots. It makes that computation see the
            bytes.
        """
        self.write_slab(layer, slots, slab)
        return seen

    def _bytes(self, layer: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        return self.keys[layer].view(torch.uint8).numpy(), self.values[layer].view(torch.uint8).numpy()


def seen() -> None:
    """Do nothing: on the CPU, written bytes are visible at once."""


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written. torch.zeros would touch every page.

    The memory must be zero: a masked slot enters a product with weight zero, and NaN would survive that.
    """
    size = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)


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
