"""The codec protocol, and conversions between KV dtypes and float32 with NumPy.

NumPy works on the calling thread. PyTorch would start threads that compete with the computation for cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

#: By KV dtype: its safetensors name, bytes per number, and exponent bits.
DTYPES: Mapping[str, tuple[str, int, int]] = {
    "float32": ("F32", 4, 0x7F80_0000),
    "bfloat16": ("BF16", 2, 0x7F80),
    "float16": ("F16", 2, 0x7C00),
}
#: Pool dtypes that no lossy codec accepts, with their safetensors names. The last four bytes of each head are its
#: scale, one float32.
SCALED: Mapping[str, str] = {"int8": "I8", "fp8": "F8_E4M3"}
SCALE_BYTES = 4
_SIZES = {name: size for name, size, _ in DTYPES.values()} | dict.fromkeys(SCALED.values(), 1)

#: Maxima below this count as zero: dividing by them would overflow float32.
_LEAST = 1e-30

Slab = npt.NDArray[np.uint8]
"""The keys and values of one layer: (2, kv_heads, tokens, bytes of a head)."""

Floats = npt.NDArray[np.float32]
Shape = tuple[int, int, int, int]
"""Shape of a slab in numbers: 2, kv_heads, tokens, head_dim. The scale of a scaled dtype counts as four numbers."""


@dataclass(frozen=True, slots=True)
class SlabPart:
    """A tensor of an encoded slab, as safetensors describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


class Codec(Protocol):
    """A form of one layer's KV. Each codec is a Python module with these functions.

    Decoding and encoding again gives the same bytes, except for the last bit of float32. So forms may move between
    tiers.
    """

    def parts(self, shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
        """The tensors of an encoded slab, in their order in memory."""
        ...

    def nbytes(self, shape: Shape, kv_dtype: str) -> int:
        """The size of an encoded slab."""
        ...

    def encode(self, slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
        """Encode a slab of finite numbers."""
        ...

    def decode(self, data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
        """Decode a slab; a lossy codec restores it approximately."""
        ...


def size_of(parts: Iterable[SlabPart]) -> int:
    """The total bytes of the parts of an encoded slab."""
    return sum(part.nbytes for part in parts)


def split(data: npt.NDArray[np.uint8], parts: Sequence[SlabPart]) -> list[npt.NDArray[np.uint8]]:
    """Split an encoded slab into the bytes of each part."""
    borders = np.cumsum([part.nbytes for part in parts])[:-1]
    return np.split(data, borders)


def to_floats(data: npt.NDArray[np.uint8], kv_dtype: str) -> Floats:
    """Convert bytes, (…, bytes), to numbers, (…, numbers)."""
    if kv_dtype == "bfloat16":
        return (data.view("<u2").astype("<u4") << 16).view(np.float32)
    return data.view("<f2" if kv_dtype == "float16" else "<f4").astype(np.float32)


def from_floats(numbers: Floats, kv_dtype: str) -> npt.NDArray[np.uint8]:
    """Convert numbers to bytes, rounding to the nearest value of the dtype."""
    if kv_dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(numbers.astype("<f2" if kv_dtype == "float16" else "<f4")).view(np.uint8)


def scaled(numbers: Floats, largest: Floats, to: float) -> Floats:
    """Scale numbers so that ``largest``, which must broadcast, maps to ``to``."""
    factor = np.divide(to, largest, out=np.zeros_like(largest), where=largest > _LEAST)
    return numbers * factor
