"""Keys and values in 8 bits, as int8 or fp8, with an fp32 scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

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
