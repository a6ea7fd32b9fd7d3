"""The convolution and the scans of recurrent layers, over packed rows and state slots.

Each function has the signature of the stock function that it replaces. It splits the packed rows by sequence, reads the
state in front of each, computes with the stock PyTorch code, and writes the state behind. All decode rows run as one
batch. On a CPU the compiled kernel computes instead (compiled.py).

The packages fla, mamba-ssm and causal-conv1d replace some stock functions when installed. Their kernels differ in
rounding, so the PyTorch code below the replacement is used (``inspect.unwrap``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.activations import ACT2FN

from inlay.models.interface import carried_pass
from inlay.models.mixers import compiled
from inlay.models.mixers.states import PassStates

#: A scan of rows: arrays (batch, rows, ...) and states (batch, ...) or None → output (batch, rows, ...) and new states.
Scan = Callable[[tuple[Tensor, ...], Tensor | None], tuple[Tensor, Tensor]]


def states_now() -> PassStates:
    """Return the states of the running pass."""
    running = carried_pass()
    assert running is not None, "a recurrent layer runs outside of a pass"
    assert running.states is not None, "a recurrent layer runs without states"
    return running.states


def convolve(
    x: Tensor,  # (1, channels, rows)
    weight: Tensor,  # (channels, kernel)
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """The causal convolution over packed rows: each sequence sees its own last columns."""
    states, rows = states_now(), x[0]
    if compiled.takes_convolution(x, weight, activation):
        return compiled.convolve(states, x, weight, bias, activation)
    channels, kernel = weight.shape
    before = kernel - 1
    part = states.part("columns", (channels, before), x.dtype)
    out = torch.empty((channels, states.rows), dtype=weight.dtype, device=x.device)
    if states.steps:
        window = torch.cat((part[states.step_sources], rows.t()[states.step_rows][..., None]), -1)
        part[states.step_targets] = window[..., 1:]
        stepped = F.conv1d(window.to(weight.dtype), weight.unsqueeze(1), bias, groups=channels)
        out[:, states.step_rows] = stepped[..., 0].t()
    if states.long:
        windows = []
        for first, count, span in states.long:
            columns = rows.new_zeros((channels, before)) if span.source is None else part[span.source]
            window = torch.cat((columns, rows[:, first : first + count]), 1)
            windows.append(window)
            for end, slot in (*span.marks, (count, span.target)):
                part[slot] = window[:, end : end + before]
        convolved = F.conv1d(torch.cat(windows, 1).to(weight.dtype)[None], weight.unsqueeze(1), bias, groups=channels)[
            0
        ]
        at = 0
        for first, count, _span in states.long:
            out[:, first : first + count] = convolved[:, at : at + count]
            at += count + before
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(x.dtype)[None]


def scan(arrays: tuple[Tensor, ...], shape: tuple[int, ...], whole: Scan, step: Scan) -> Tensor:
    """Scan packed rows, (1, rows, ...) each, from the states of their sequences. Returns (1, rows, ...).

    Args:
        shape: of one sequence's recurrent state, which is kept in fp32.
        whole: scans several rows of one sequence.
        step: scans one row of each of several sequences.
    """
    states = states_now()
    part = states.part("state", shape, torch.float32)
    outputs: list[tuple[Tensor | slice, Tensor]] = []
    if states.steps:
        batch = tuple(array[0, states.step_rows].unsqueeze(1) for array in arrays)
        output, after = step(batch, part[states.step_sources])
        part[states.step_targets] = after
        outputs.append((states.step_rows, output[:, 0]))
    state: Tensor | None = None
    for piece in states.pieces:
        if not piece.goes_on:
            state = None if piece.source is None else part[piece.source][None]
        if piece.end > piece.first:
            output, state = whole(tuple(array[:, piece.first : piece.end] for array in arrays), state)
            outputs.append((slice(piece.first, piece.end), output[0]))
        assert state is not None, "a sequence has at least one row"
        part[piece.target] = state[0]
    first = outputs[0][1]
    result = first.new_empty((states.rows, *first.shape[1:]))
    for rows, output in outputs:
        result[rows] = output
    return result[None]


def refuse_step(*_: Any, **__: Any) -> Any:
    """Stand for the stock operations of single steps, which only run with transformers' cache."""
    raise AssertionError("a pass has no transformers cache")


def gated_delta(home: ModuleType) -> Callable[..., Any]:
    """Return the gated delta rule (Yang et al., arXiv 2412.06464) of a modeling file."""
    whole = inspect.unwrap(home.torch_chunk_gated_delta_rule)
    return _delta(whole, inspect.unwrap(home.torch_recurrent_gated_delta_rule))


def kimi_delta(home: ModuleType) -> Callable[..., Any]:
    """Return Kimi's delta attention (arXiv 2510.26692), which has a decay for each channel."""
    return _delta(inspect.unwrap(home.chunk_kimi_delta_attention), inspect.unwrap(home.recurrent_kimi_delta_attention))


def _delta(stock_whole: Callable[..., Any], stock_step: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(
        query: Tensor,  # (1, rows, key heads, key width)
        key: Tensor,
        value: Tensor,  # (1, rows, value heads, value width)
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        def by(stock: Callable[..., Any]) -> Scan:
            def run(arrays: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
                query, key, value, g, beta = arrays
                output, after = stock(
                    query,
                    key,
                    value,
                    g=g,
                    beta=beta,
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                )
                return output, after

            return run

        if compiled.takes_delta(value, key):
            normed = use_qk_l2norm_in_kernel
            return compiled.delta(states_now(), query, key, value, g, beta, normed=normed), None
        shape = (value.shape[2], key.shape[-1], value.shape[-1])
        return scan((query, key, value, g, beta), shape, by(stock_whole), by(stock_step)), None

    return replaced


def mamba2(home: ModuleType) -> Callable[..., Any]:
    """Return the scan of Mamba-2 (Dao and Gu, arXiv 2405.21060)."""
    stock = inspect.unwrap(home.mamba2_chunk_scan)

    def replaced(
        hidden_states: Tensor,  # (1, rows, heads, head width)
        dt: Tensor,  # (1, rows, heads)
        A: Tensor,  # noqa: N803  (heads,)
        B: Tensor,  # noqa: N803  (1, rows, groups, state width)
        C: Tensor,  # noqa: N803
        chunk_size: int,
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        heads, width = hidden_states.shape[2:]
        if compiled.takes_state_space(hidden_states, B):
            return compiled.state_space(
                states_now(), hidden_states, dt, A, B, C, D, bias=dt_bias, softplus=dt_softplus, limit=dt_limit
            )

        def whole(arrays: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
            x, time, b, c = arrays
            output, after = stock(
                x,
                time,
                A,
                b,
                c,
                chunk_size=min(chunk_size, x.shape[1]),
                D=D,
                dt_bias=dt_bias,
                initial_states=state,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                return_final_states=True,
            )
            return output, after

        def step(arrays: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
            # The stock single step does not clamp the time step to its limit. The stock scan does, so this does too.
            assert state is not None, "a step continues a state"
            x, time, b, c = (array[:, 0] for array in arrays)
            time = time if dt_bias is None else time + dt_bias.to(time.dtype)
            time = F.softplus(time) if dt_softplus else time
            time, x = torch.clamp(time, *dt_limit).float(), x.float()
            b, c = (each.float().repeat_interleave(heads // each.shape[1], 1) for each in (b, c))
            decay = torch.exp(A.float() * time)[..., None, None]
            after = state * decay + (x * time[..., None])[..., None] * b[:, :, None]
            output = (after * c[:, :, None]).sum(-1)
            output = output if D is None else output + x * D[:, None]
            return output[:, None], after

        return scan((hidden_states, dt, B, C), (heads, width, B.shape[-1]), whole, step)

    return replaced


def mamba1(_: ModuleType) -> Callable[..., Any]:
    """Return the selective scan of Mamba (Gu and Dao, arXiv 2312.00752). The stock scan takes no initial state."""

    def replaced(
        hidden_states: Tensor,  # (1, channels, rows)
        dt: Tensor,  # (1, channels, rows)
        A: Tensor,  # noqa: N803  (channels, state width)
        B: Tensor,  # noqa: N803  (1, state width, rows)
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Tensor:
        assert not return_last_state, "a pass has no transformers cache"
        time = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        time = F.softplus(time) if delta_softplus else time

        def whole(arrays: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
            x, step, b, c = (array.float() for array in arrays)  # (batch, rows, ...)
            state = x.new_zeros((x.shape[0], *A.shape)) if state is None else state
            found = []
            for row in range(x.shape[1]):
                decay = torch.exp(step[:, row, :, None] * A.float())
                state = state * decay + (step[:, row] * x[:, row])[..., None] * b[:, row, None]
                found.append((state * c[:, row, None]).sum(-1))
            return torch.stack(found, 1), state

        arrays = tuple(array.transpose(1, 2) for array in (hidden_states, time, B, C))
        output = scan(arrays, tuple(A.shape), whole, whole).transpose(1, 2)
        output = output if D is None else output + hidden_states * D[None, :, None]
        return output if z is None else output * F.silu(z)

    return replaced


#: Name of a stock scan → its replacement, and the name of the stock single step.
SCANS: dict[str, tuple[Callable[[ModuleType], Callable[..., Any]], str]] = {
    "torch_chunk_gated_delta_rule": (gated_delta, "torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": (kimi_delta, "recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": (mamba2, "mamba2_selective_state_update"),
    "mamba_selective_scan": (mamba1, "mamba_selective_state_update"),
}
