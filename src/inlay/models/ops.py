"""The small steps between matrix products, one call each: in the compiled kernel if available, else in PyTorch.

Stock modules need four to ten calls for each step, and round to the model's dtype after every one. Here a step computes
in fp32 and rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from inlay.attention.kernel import kernel

DTYPES = (torch.float32, torch.bfloat16)

#: True if the compiled steps are in use.
COMPILED = kernel is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        x: (..., width).
        weight: (width,), of the same dtype.
    """
    if not (COMPILED and x.is_contiguous() and weight.dtype == x.dtype and x.dtype in DTYPES):
        return F.rms_norm(x, weight.shape, weight, eps)
    out = torch.empty_like(x)
    width = x.shape[-1]
    kernel.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.dtype == torch.bfloat16, x.numel() // width, 1, width,
        width, width, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def norm_heads_(heads: Tensor, weight: Tensor, eps: float) -> None:
    """RMSNorm of every head, in place. heads: (rows, heads, head_dim), with contiguous heads and dimensions."""
    if not (COMPILED and _together(heads) and weight.dtype == heads.dtype and heads.dtype in DTYPES):
        heads.copy_(F.rms_norm(heads, weight.shape, weight, eps))
        return
    rows, count, width = heads.shape
    step = heads.stride(0)
    kernel.rms_norm(
        heads.data_ptr(), weight.data_ptr(), heads.data_ptr(), heads.dtype == torch.bfloat16, rows, count, width,
        step, step, eps, torch.get_num_threads(),
    )  # fmt: skip


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up (SwiGLU: Shazeer, arXiv 2002.05202).

    Args:
        gate_up: (..., 2 · width), contiguous, the gate first.

    Returns:
        (..., width).
    """
    width = gate_up.shape[-1] // 2
    if not (COMPILED and gate_up.is_contiguous() and gate_up.dtype in DTYPES):
        gate, up = gate_up.split(width, -1)
        return F.silu(gate).mul_(up)
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    kernel.silu_mul(
        gate_up.data_ptr(), out.data_ptr(), out.dtype == torch.bfloat16, gate_up.numel() // (2 * width), width,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads to their positions, in place (Su et al., arXiv 2104.09864; halves of a head, as in Llama).

    Args:
        heads: (rows, heads, head_dim), with contiguous heads and dimensions.
        cos, sin: (rows, head_dim), contiguous, fp32, with equal halves.
    """
    rows, count, width = heads.shape
    if COMPILED and _together(heads) and heads.dtype in DTYPES and cos.is_contiguous() and sin.is_contiguous():
        kernel.rotate(
            heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), heads.dtype == torch.bfloat16, rows, count, width,
            heads.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return
    wide = heads.float()
    swapped = torch.cat((-wide[..., width // 2 :], wide[..., : width // 2]), -1)
    heads.copy_(torch.addcmul(wide * cos.unsqueeze(1), swapped, sin.unsqueeze(1)))


def _together(heads: Tensor) -> bool:
    """Return True if the heads of a row are contiguous."""
    return heads.stride()[1:] == (heads.shape[-1], 1)


def unpack_int4(packed: Tensor, scales_zeros: Tensor, group: int, first: int, blocks: int) -> Tensor:
    """Unpack blocks of 64 outputs of a 4-bit weight that PyTorch packed. Requires the compiled kernel.

    Args:
        packed: (outputs, inputs / 2), uint8.
        scales_zeros: (inputs / group, outputs, 2).
        group: Inputs of a group.
        first, blocks: The range of blocks.

    Returns:
        The transposed weight, (inputs, 64 · blocks), in the dtype of ``scales_zeros``.
    """
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    weights = torch.empty(inputs, 64 * blocks, dtype=scales_zeros.dtype)
    kernel.unpack_int4(
        packed.data_ptr(), scales_zeros.data_ptr(), weights.data_ptr(), weights.dtype == torch.bfloat16, inputs,
        outputs, group, first, blocks, torch.get_num_threads(),
    )  # fmt: skip
    return weights
