"""Triton's backend in the interpreter, and the specification's results of the same passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from hypothesis import strategies as st
from torch import Tensor

from inlay.attention.plan import Part, build_plan
from inlay.attention.triton.backend import TritonBackend
from inlay.attention.triton.tables import CostModel
from tests.unit.attention.kernel_cases import Layer, bf16, expected_of, fp32, fresh_of, pool_for, with_rotary

fp16 = torch.float16

#: Partial results cost nothing, so rows share wherever they can.
SHARING = CostModel(partial_byte_s=0, multiply_s=0, launch_s=0, work_s=0)

TOLERANCES = {fp32: 2e-5, fp16: 4e-3, bf16: 3e-2}

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="Triton was imported without its interpreter"
)


def backend(costs: CostModel = SHARING, **settings: Any) -> TritonBackend:
    return TritonBackend(costs=costs, **settings)


def check(layer: Layer, parts: Sequence[Part], using: TritonBackend | None = None, *, share: bool = True) -> None:
    """The backend's output must be the reference's."""
    plan, pool = build_plan(parts, share=share), pool_for(layer, parts)
    fresh = fresh_of(layer, plan.rows)
    output = (using or backend()).attend(*fresh, pool, plan, 0, layer.options)
    same(layer, output, expected_of(layer, parts, fresh, pool))


def same(layer: Layer, output: Tensor, expected: Tensor) -> None:
    assert output.dtype == layer.fresh
    allowed = max(TOLERANCES[layer.fresh], 0 if layer.fresh == fp32 else TOLERANCES[layer.stored])
    torch.testing.assert_close(output.float(), expected.float(), atol=allowed, rtol=allowed)


@st.composite
def variations(draw: st.DrawFn) -> Layer:
    """Layers with any of the options, in any dtype."""
    dtype = draw(st.sampled_from([fp32, fp32, fp16, bf16]))
    heads = draw(st.sampled_from([2, 6, 8, 32]))
    layer = Layer(heads=heads, head_dim=draw(st.sampled_from([8, 24, 64])), stored=dtype, fresh=dtype)
    layer = with_rotary(layer, draw(st.sampled_from([None, layer.head_dim // 2, 2])), interleaved=draw(st.booleans()))
    options = replace(
        layer.options,
        window=draw(st.sampled_from([None, None, 1, 20, 150, 2**31 - 1, 2**40])),
        softcap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.sampled_from([None, torch.linspace(-2, 2, heads)])),
        slopes=draw(st.sampled_from([None, torch.linspace(0.01, 0.3, heads)])),
    )
    return replace(layer, options=options)
