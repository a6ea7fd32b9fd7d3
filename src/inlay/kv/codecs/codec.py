"""What every codec does, and what codecs compute with: numbers of the KV dtypes as float32, by NumPy.

NumPy works on whatever thread calls it; PyTorch would start threads that take the cores from those that compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

#: What safetensors calls a dtype, the bytes of one number, and the bits of its exponent.
DTYPES: Mapping[str, tuple[str, int, int]] = {
    "float32": ("F32", 4, 0x7F80_0000),
    "bfloat16": ("BF16", 2, 0x7F80),
    "float16": ("F16", 2, 0x7C00),
}
#: Dtypes of the pool that no lossy codec takes, and what safetensors calls them: the last four bytes of each head are
#: its scale, one float32.
SCALED: Mapping[str, str] = {"int8": "I8", "fp8": "F8_E4M3"}
SCALE_BYTES = 4
_SIZES = {name: size for name, size, _ in DTYPES.values()} | dict.fromkeys(SCALED.values(), 1)

#: Largest numbers below this are taken for zero: what they are divided by would leave the range of float32.
_LEAST = 1e-30

Slab = npt.NDArray[np.uint8]
"""The keys and values of one layer: (2, kv_heads, tokens, bytes of a head)."""

Floats = npt.NDArray[np.float32]
Shape = tuple[int, int, int, int]
"""Of a slab in numbers: 2, kv_heads, tokens, head_dim; of a scaled dtype the scale counts as four."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of an encoded slab, as safetensors describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


class Codec(Protocol):
    """A form of the keys and values of one layer. A module is one: codecs are its functions.

    What is decoded and encoded again is the same, but for the last bit of float32: a form may go from tier to tier.
    """

    def parts(self, shape: Shape, kv_dtype: str) -> tuple[Part, ...]:
        """The tensors that a slab of this shape becomes, in the order in which they lie."""
        ...

    def nbytes(self, shape: Shape, kv_dtype: str) -> int:
        """How many bytes they have."""
        ...

    def encode(self, slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
        """Those bytes. slab: of finite numbers."""
        ...

    def decode(self, data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
        """The slab, as far as it can be told from them."""
        ...


def size_of(parts: Iterable[Part]) -> int:
    """How many bytes the parts of an encoded slab have."""
    return sum(part.nbytes for part in parts)


def split(data: npt.NDArray[np.uint8], parts: Sequence[Part]) -> list[npt.NDArray[np.uint8]]:
    """The bytes of each part."""
    borders = np.cumsum([part.nbytes for part in parts])[:-1]
    return np.split(data, borders)


def to_floats(data: npt.NDArray[np.uint8], kv_dtype: str) -> Floats:
    """Bytes, (…, bytes), as numbers, (…, numbers)."""
    if kv_dtype == "bfloat16":
        return (data.view("<u2").astype("<u4") << 16).view(np.float32)
    return data.view("<f2" if kv_dtype == "float16" else "<f4").astype(np.float32)


def from_floats(numbers: Floats, kv_dtype: str) -> npt.NDArray[np.uint8]:
    """The other way round; each number becomes the nearest one that the dtype has."""
    if kv_dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(numbers.astype("<f2" if kv_dtype == "float16" else "<f4")).view(np.uint8)


def scaled(numbers: Floats, largest: Floats, to: float) -> Floats:
    """Numbers, so that the largest ones, which have to fit their shape, come to lie at ``to``."""
    factor = np.divide(to, largest, out=np.zeros_like(largest), where=largest > _LEAST)
    return numbers * factor
