"""The treatment of bf16 in Triton's interpreter, which the backend relies on."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from inlay.attention.plan import Part
from inlay.slots import SlotRange
from tests.model.attention.triton.cases import check, interpreted
from tests.unit.attention.kernel_cases import Layer

pytestmark = interpreted


@triton.jit
def product(a_ptr, b_ptr, c_ptr, WIDE: tl.constexpr):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(c_ptr + i, tl.dot(a, b, input_precision="ieee"))


def multiplied(dtype: torch.dtype, *, wide: bool) -> torch.Tensor:
    a, b, c = torch.full((16, 16), 0.5, dtype=dtype), torch.eye(16, dtype=dtype), torch.empty(16, 16)
    product[(1,)](a, b, c, WIDE=wide)
    return c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_narrow_products_are_right(dtype):
    assert torch.equal(multiplied(dtype, wide=False), torch.full((16, 16), 0.5))


def test_wide_products_of_bf16_are_right():
    """If this fails, no test of bf16 in the interpreter says anything."""
    assert torch.equal(multiplied(torch.bfloat16, wide=True), torch.full((16, 16), 0.5))
    check(Layer(stored=torch.bfloat16, fresh=torch.bfloat16), [Part.of(0, 40, (), (SlotRange(0, 40),))])


@pytest.mark.xfail(strict=True, reason="the interpreter multiplies the bits of bf16 numbers as whole numbers")
def test_products_of_bf16_are_right():
    """Where this passes, the interpreter has been mended, and the backend need not widen bf16 any more."""
    assert torch.equal(multiplied(torch.bfloat16, wide=False), torch.full((16, 16), 0.5))
