"""8-bit integers: keys scaled per head and channel, values per head and token (KIVI, arXiv 2402.02750, section 3).

A few channels of keys are much larger than the others in every token; values have no such channels. The scale is
stored as the largest absolute value of each row. That is a number of the KV dtype, so it is stored exactly, and
encoding a decoded slab gives the same scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inlay.kv.offload.codecs.codec import DTYPES, Shape, Slab, SlabPart, from_floats, scaled, size_of, split, to_floats

_MOST = 127
_AXES = (0, 1)  # axis of (tokens, head_dim) that shares a scale: tokens for keys, channels for values


def parts(shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
    _, heads, tokens, width = shape
    dtype = DTYPES[kv_dtype][0]
    return (
        SlabPart("kv", "I8", shape),
        SlabPart("key_max", dtype, (heads, width)),
        SlabPart("value_max", dtype, (heads, tokens)),
    )


def nbytes(shape: Shape, kv_dtype: str) -> int:
    return size_of(parts(shape, kv_dtype))


def encode(slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
    numbers: list[npt.NDArray[np.uint8]] = []
    largest: list[npt.NDArray[np.uint8]] = []
    for half, axis in zip(slab, _AXES, strict=True):
        for head in half:  # one head at a time fits the processor's cache
            exact = to_floats(np.ascontiguousarray(head), kv_dtype)
            most = np.abs(exact).max(axis, keepdims=True)
            numbers.append(np.rint(scaled(exact, most, _MOST)).astype(np.int8).view(np.uint8).reshape(-1))
            largest.append(from_floats(most.reshape(-1), kv_dtype))
    return np.concatenate([*numbers, *largest])


def decode(data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
    _, heads, tokens, width = shape
    numbers, *largest = split(data, parts(shape, kv_dtype))
    slab = np.empty((*shape[:-1], width * DTYPES[kv_dtype][1]), np.uint8)
    rounded = numbers.view(np.int8).reshape(shape)
    for which, (rows, most) in enumerate(zip(((1, width), (tokens, 1)), largest, strict=True)):
        scales = to_floats(most, kv_dtype).reshape(heads, *rows) / np.float32(_MOST)
        for head in range(heads):
            slab[which, head] = from_floats(rounded[which, head] * scales[head], kv_dtype)
    return slab
