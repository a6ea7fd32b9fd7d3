"""The small steps between matrix products, each in one call: in the compiled kernel where it is there, else in PyTorch.

Stock modules take each of these in four to ten calls, and round to the model's dtype after every one. Here a step
computes in fp32 and rounds once.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_TYPES = {torch.float32: 0, torch.bfloat16: 1}

try:
    _kernel: Any = importlib.import_module("inlay._kernel")
except ImportError:  # installed without a compiler
    _kernel = None

#: Whether the compiled steps are in use.
COMPILED = hasattr(_kernel, "rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    x: (..., width); weight: (width,), the same dtype.
    """
    if not _compiled(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    _kernel.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, _TYPES[x.dtype], _threads()
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (SwiGLU: Shazeer, arXiv 2002.05202).

    gate_up: (..., 2 · width), the gate first. Returns (..., width).
    """
    width = gate_up.shape[-1] // 2
    if not (_compiled(gate_up) and gate_up.is_contiguous()):
        gate, up = gate_up.split(width, -1)
        return F.silu(gate).mul_(up)
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    rows = out.numel() // width
    _kernel.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, _TYPES[out.dtype], _threads())
    return out


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn heads to their positions, in place (Su et al., arXiv 2104.09864; halves of a head, as in Llama).

    heads: (rows, heads, head_dim), heads and dimensions contiguous.
    cos, sin: (rows, head_dim), fp32, the two halves alike.
    """
    rows, count, width = heads.shape
    if not (_compiled(heads) and cos.is_contiguous() and sin.is_contiguous() and heads.stride()[1:] == (width, 1)):
        wide = heads.float()
        swapped = torch.cat((-wide[..., width // 2 :], wide[..., : width // 2]), -1)
        heads.copy_(torch.addcmul(wide * cos.unsqueeze(1), swapped, sin.unsqueeze(1)))
        return
    _kernel.rotate(
        heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, count, width, heads.stride(0), _TYPES[heads.dtype],
        _threads(),
    )  # fmt: skip


def norm_heads_(heads: Tensor, weight: Tensor, eps: float) -> None:
    """RMSNorm of every head, in place. heads: (rows, heads, head_dim); weight: (head_dim,)."""
    heads.copy_(rms_norm(heads, weight, eps))


def _compiled(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    return COMPILED and dtype in _TYPES and all(t.dtype == dtype and t.device.type == "cpu" for t in tensors)


def _threads() -> int:
    return torch.get_num_threads()
