"""The operations of recurrent layers in the compiled kernel (csrc/scan.h): all spans of a pass in one call, on a CPU.

The same in PyTorch, in operations.py, is the specification. It serves GPUs, shapes that the kernel does not take, and
installations without the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from inlay.attention.kernel import kernel
from inlay.models.mixers.states import PassStates

#: True if the kernel has these scans.
COMPILED = hasattr(kernel, "scan_delta")

_LANES, _CHANNELS, _MOST_KEYS, _MOST_KERNEL = 16, 4, 256, 8  # see csrc/scan.h
_SILU = ("silu", "swish")


def takes_convolution(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    """Return True if the kernel convolves these. x: (1, channels, rows). weight: (channels, kernel)."""
    channels, kernel_width = weight.shape
    known = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    fits = not channels % _LANES and kernel_width <= _MOST_KERNEL and activation in (None, *_SILU)
    return hasattr(kernel, "convolve") and x.device.type == "cpu" and known and fits


def convolve(
    states: PassStates,
    x: Tensor,  # (1, channels, rows), fp32 or bf16
    weight: Tensor,  # (channels, kernel)
    bias: Tensor | None,
    activation: str | None,
    *,
    instruction_set: str = "",
) -> Tensor:
    """Return the causal convolution, (1, channels, rows), and update the states. Sums are in fp32."""
    rows = x[0].t()
    channels, width = weight.shape
    if rows.stride(1) != 1 or (len(rows) > 1 and rows.stride(0) < channels):
        rows = rows.contiguous()
    stride = rows.stride(0) if len(rows) > 1 else channels  # that of one row means nothing
    pool = states.part("columns", (channels, width - 1), x.dtype)
    taps = weight.t().float().contiguous()
    added = None if bias is None else bias.float().contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype)
    kernel.convolve(
        rows.data_ptr(), taps.data_ptr(), 0 if added is None else added.data_ptr(), pool.data_ptr(), out.data_ptr(),
        rows.shape[0], pool.shape[0], channels, width, stride, x.dtype == torch.bfloat16, activation in _SILU,
        *states.spans, instruction_set, torch.get_num_threads(),
    )  # fmt: skip
    return out.t()[None]


def takes_delta(value: Tensor, key: Tensor) -> bool:
    """Return True if the kernel scans heads of these widths. value, key: (1, rows, heads, width)."""
    fits = not value.shape[-1] % _LANES and not key.shape[-1] % 4 and key.shape[-1] <= _MOST_KEYS
    return COMPILED and value.device.type == "cpu" and fits


def delta(
    states: PassStates,
    query: Tensor,  # (1, rows, key heads, key width)
    key: Tensor,
    value: Tensor,  # (1, rows, value heads, value width)
    g: Tensor,  # (1, rows, value heads), or (1, rows, value heads, key width)
    beta: Tensor,  # (1, rows, value heads)
    *,
    normed: bool,
    instruction_set: str = "",
) -> Tensor:
    """Return the output of the gated delta rule, (1, rows, value heads, value width), and update the states.

    Args:
        normed: True to norm each query and key first.
    """
    kind, rows = query.dtype, query.shape[1]
    q, k = (_unit(each[0].float()) if normed else each[0].float() for each in (query, key))
    q = (q * q.shape[-1] ** -0.5).contiguous()
    k, v, b = k.contiguous(), value[0].float().contiguous(), beta[0].float().contiguous()
    decay = g[0].float().exp().contiguous()
    (heads, width), keys = v.shape[1:], k.shape[-1]
    pool = states.part("state", (heads, keys, width), torch.float32)
    out = torch.empty_like(v)
    kernel.scan_delta(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), b.data_ptr(), pool.data_ptr(), out.data_ptr(),
        rows, pool.shape[0], k.shape[1], heads, keys, width, keys if decay.dim() == 3 else 1, *states.spans,
        instruction_set, torch.get_num_threads(),
    )  # fmt: skip
    return out[None].to(kind)


def takes_state_space(x: Tensor, b: Tensor) -> bool:
    """Return True if the kernel scans heads of these widths. x, b: (1, rows, heads or groups, width)."""
    return COMPILED and x.device.type == "cpu" and not x.shape[-1] % _CHANNELS and not b.shape[-1] % _LANES


def state_space(
    states: PassStates,
    x: Tensor,  # (1, rows, heads, width)
    time: Tensor,  # (1, rows, heads)
    a: Tensor,  # (heads,)
    b: Tensor,  # (1, rows, groups, state width)
    c: Tensor,
    d: Tensor | None,
    *,
    bias: Tensor | None,
    softplus: bool,
    limit: tuple[float, float],
    instruction_set: str = "",
) -> Tensor:
    """Return the output of Mamba-2's scan, (1, rows, heads, width) in fp32, and update the states."""
    time = time[0] if bias is None else time[0] + bias.to(time.dtype)
    time = torch.clamp(F.softplus(time) if softplus else time, *limit).float().contiguous()
    decay = torch.exp(a.float() * time).contiguous()
    x = x[0].float().contiguous()
    b, c = b[0].float().contiguous(), c[0].float().contiguous()
    rows, heads, width = x.shape
    pool = states.part("state", (heads, width, b.shape[-1]), torch.float32)
    out = torch.empty_like(x)
    kernel.scan_state_space(
        x.data_ptr(), decay.data_ptr(), time.data_ptr(), b.data_ptr(), c.data_ptr(), pool.data_ptr(), out.data_ptr(),
        rows, pool.shape[0], heads, width, b.shape[1], b.shape[2], *states.spans, instruction_set,
        torch.get_num_threads(),
    )  # fmt: skip
    return (out if d is None else out + x * d[:, None])[None]


def _unit(x: Tensor) -> Tensor:
    """Each vector divided by its length, as the stock code does it."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
