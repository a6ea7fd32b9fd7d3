"""8-bit floating point, e4m3 (arXiv 2209.05433): a sign, 4 bits of exponent, 3 of mantissa.

The relative error does not depend on neighbours, so all keys or all values of a head share one scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inlay.kv.offload.codecs.codec import (
    DTYPES,
    Floats,
    Shape,
    Slab,
    SlabPart,
    from_floats,
    scaled,
    size_of,
    split,
    to_floats,
)

_MOST = 448.0
_BIAS = 127 - 7  # float32's exponent bias minus e4m3's
_SUBNORMAL = 2.0**-6  # below this, numbers are multiples of 2 ** -9


def parts(shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
    return SlabPart("kv", "F8_E4M3", shape), SlabPart("max", DTYPES[kv_dtype][0], shape[:2])


def nbytes(shape: Shape, kv_dtype: str) -> int:
    return size_of(parts(shape, kv_dtype))


def encode(slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
    numbers: list[npt.NDArray[np.uint8]] = []
    largest: list[npt.NDArray[np.uint8]] = []
    for half in slab:
        for head in half:
            exact = to_floats(np.ascontiguousarray(head), kv_dtype)
            most = np.abs(exact).max(keepdims=True)
            numbers.append(to_e4m3(scaled(exact, most, _MOST)).reshape(-1))
            largest.append(from_floats(most.reshape(-1), kv_dtype))
    return np.concatenate([*numbers, *largest])


def decode(data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
    numbers, most = split(data, parts(shape, kv_dtype))
    scales = to_floats(most, kv_dtype).reshape(shape[:2]) / np.float32(_MOST)
    slab = np.empty((*shape[:-1], shape[-1] * DTYPES[kv_dtype][1]), np.uint8)
    codes = numbers.reshape(shape)
    for which, head in np.ndindex(shape[:2]):
        slab[which, head] = from_floats(
            np.multiply(E4M3[codes[which, head]], scales[which, head], dtype=np.float32), kv_dtype
        )
    return slab


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
