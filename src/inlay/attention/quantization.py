"""Keys and values in 8 bits, whole numbers or fp8, with an fp32 scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

#: The dtypes as settings and segments name them.
NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

#: The number that the largest one of a row becomes: of fp8 the largest that it has.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

#: Behind the numbers of a row, where keys leave the pool for another tier: one fp32.
SCALE_BYTES = 4

_LEAST = 1e-30  # of the largest number of a row; smaller ones are zero, as what they are divided by would be no number


def quantize(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of numbers, (…, head_dim), to the nearest in 8 bits, ties to even, and their scales, (…,), fp32.

    What is no number leaves a scale that is none. The kernel ``store`` does the same.
    """
    exact, largest = numbers.float(), LARGEST[dtype]
    most = exact.abs().amax(-1, keepdim=True)
    finite, some = most <= torch.finfo(torch.float32).max, most > _LEAST
    factor = torch.where(finite & some, most.reciprocal() * largest, 0.0)
    small = torch.where(finite, exact * factor, 0.0)
    scale = torch.where(finite, torch.where(some, most / largest, 0.0), torch.nan)
    return (small.round() if dtype == torch.int8 else small).to(dtype), scale[..., 0]


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """The numbers of rows, (…, head_dim), fp32. scales: (…,)."""
    return numbers.float() * scales[..., None]
