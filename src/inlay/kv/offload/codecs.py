"""Codecs: the forms of KV in the tiers below the pool; see docs/guides/cache-tiers.md.

The format of a name never changes while data in it may be read. A new format gets a new name. The conversions use
NumPy, which works on the calling thread. PyTorch would start threads that compete with the computation for cores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

#: The largest integer of int8, and the largest number of e4m3.
_MOST_INT8, _MOST_E4M3 = 127, 448.0
#: float32's exponent bias minus e4m3's.
_BIAS = 127 - 7
_SUBNORMAL = 2.0**-6  # below this, e4m3 numbers are multiples of 2 ** -9
#: The axis of (tokens, head_dim) that shares a scale of int8: tokens for keys, channels for values.
_AXES = (0, 1)

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


class Codec(ABC):
    """A form of one layer's KV.

    Decoding and encoding again gives the same bytes, except for the last bit of float32. So forms may move between
    tiers.
    """

    @abstractmethod
    def parts(self, shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
        """The tensors of an encoded slab, in their order in memory."""

    def nbytes(self, shape: Shape, kv_dtype: str) -> int:
        """The size of an encoded slab."""
        return sum(part.nbytes for part in self.parts(shape, kv_dtype))

    @abstractmethod
    def encode(self, slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
        """Encode a slab of finite numbers."""

    @abstractmethod
    def decode(self, data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
        """Decode a slab; a lossy codec restores it approximately."""


class Lossless(Codec):
    """The pool's own format, unchanged."""

    def parts(self, shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
        return (SlabPart("kv", SCALED.get(kv_dtype) or DTYPES[kv_dtype][0], shape),)

    def encode(self, slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(slab).reshape(-1)

    def decode(self, data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
        return data.reshape(*shape[:-1], -1)


class Int8Codec(Codec):
    """8-bit integers: keys scaled per head and channel, values per head and token (KIVI, arXiv 2402.02750, section 3).

    A few channels of keys are much larger than the others in every token; values have no such channels. The scale is
    stored as the largest absolute value of each row. That is a number of the KV dtype, so it is stored exactly, and
    encoding a decoded slab gives the same scale.
    """

    def parts(self, shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
        _, heads, tokens, width = shape
        dtype = DTYPES[kv_dtype][0]
        return (
            SlabPart("kv", "I8", shape),
            SlabPart("key_max", dtype, (heads, width)),
            SlabPart("value_max", dtype, (heads, tokens)),
        )

    def encode(self, slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
        numbers: list[npt.NDArray[np.uint8]] = []
        largest: list[npt.NDArray[np.uint8]] = []
        for half, axis in zip(slab, _AXES, strict=True):
            for head in half:  # one head at a time fits the processor's cache
                exact = to_floats(np.ascontiguousarray(head), kv_dtype)
                most = np.abs(exact).max(axis, keepdims=True)
                numbers.append(np.rint(scaled(exact, most, _MOST_INT8)).astype(np.int8).view(np.uint8).reshape(-1))
                largest.append(from_floats(most.reshape(-1), kv_dtype))
        return np.concatenate([*numbers, *largest])

    def decode(self, data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
        _, heads, tokens, width = shape
        numbers, *largest = split(data, self.parts(shape, kv_dtype))
        slab = np.empty((*shape[:-1], width * DTYPES[kv_dtype][1]), np.uint8)
        rounded = numbers.view(np.int8).reshape(shape)
        for which, (rows, most) in enumerate(zip(((1, width), (tokens, 1)), largest, strict=True)):
            scales = to_floats(most, kv_dtype).reshape(heads, *rows) / np.float32(_MOST_INT8)
            for head in range(heads):
                slab[which, head] = from_floats(rounded[which, head] * scales[head], kv_dtype)
        return slab


class Float8Codec(Codec):
    """8-bit floating point, e4m3 (arXiv 2209.05433): a sign, 4 bits of exponent, 3 of mantissa.

    The relative error does not depend on neighbours, so all keys or all values of a head share one scale.
    """

    def parts(self, shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
        return SlabPart("kv", "F8_E4M3", shape), SlabPart("max", DTYPES[kv_dtype][0], shape[:2])

    def encode(self, slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
        numbers: list[npt.NDArray[np.uint8]] = []
        largest: list[npt.NDArray[np.uint8]] = []
        for half in slab:
            for head in half:
                exact = to_floats(np.ascontiguousarray(head), kv_dtype)
                most = np.abs(exact).max(keepdims=True)
                numbers.append(to_e4m3(scaled(exact, most, _MOST_E4M3)).reshape(-1))
                largest.append(from_floats(most.reshape(-1), kv_dtype))
        return np.concatenate([*numbers, *largest])

    def decode(self, data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
        numbers, most = split(data, self.parts(shape, kv_dtype))
        scales = to_floats(most, kv_dtype).reshape(shape[:2]) / np.float32(_MOST_E4M3)
        slab = np.empty((*shape[:-1], shape[-1] * DTYPES[kv_dtype][1]), np.uint8)
        codes = numbers.reshape(shape)
        for which, head in np.ndindex(shape[:2]):
            slab[which, head] = from_floats(
                np.multiply(E4M3[codes[which, head]], scales[which, head], dtype=np.float32), kv_dtype
            )
        return slab


CODECS: Mapping[str, Codec] = {"none": Lossless(), "int8": Int8Codec(), "fp8": Float8Codec()}


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
    """Return ``numbers`` scaled so that ``largest`` becomes ``to``. ``largest`` must broadcast to the numbers."""
    factor = np.divide(to, largest, out=np.zeros_like(largest), where=largest > _LEAST)
    return numbers * factor


def to_e4m3(numbers: Floats) -> npt.NDArray[np.uint8]:
    """Round each number, at most 448 in magnitude, to the nearest e4m3 code; ties to even."""
    absolute = np.abs(numbers)
    bits = absolute.view("<u4")
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).astype(np.int32) - (_BIAS << 3)
    code = np.where(absolute < _SUBNORMAL, np.rint(absolute * 512).astype(np.int32), normal)
    signed = np.minimum(code, 0x7E) | (np.signbit(numbers).astype(np.int32) << 7)
    return np.asarray(signed, np.uint8)


def _values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    absolute = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return (np.where(code & 128, -1, 1) * absolute).astype(np.float32)


#: The value of each code. The NaN codes 0x7F and 0xFF are never written.
E4M3 = _values()
