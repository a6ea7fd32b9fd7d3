"""The pool's own format, unchanged."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inlay.kv.offload.codecs.codec import DTYPES, SCALED, Shape, Slab, SlabPart, size_of


def parts(shape: Shape, kv_dtype: str) -> tuple[SlabPart, ...]:
    return (SlabPart("kv", SCALED.get(kv_dtype) or DTYPES[kv_dtype][0], shape),)


def nbytes(shape: Shape, kv_dtype: str) -> int:
    return size_of(parts(shape, kv_dtype))


def encode(slab: Slab, kv_dtype: str) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(slab).reshape(-1)


def decode(data: npt.NDArray[np.uint8], shape: Shape, kv_dtype: str) -> Slab:
    return data.reshape(*shape[:-1], -1)
