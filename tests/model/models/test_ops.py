"""The steps between products, compiled and in PyTorch, against their definitions in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.models import ops
from tests.generated import examples
from tests.threads import computing

DTYPES = (torch.float32, torch.bfloat16)
WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not ops.COMPILED, reason="built without a compiler"))]
rows, widths = st.integers(0, 40), st.integers(1, 150)


@pytest.fixture(params=WAYS, ids=["torch", "compiled"], scope="module")
def way(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "COMPILED", request.param)
        yield


def close(found: torch.Tensor, expected: torch.Tensor, rounding: int = 1) -> bool:
    """Within so many roundings of its dtype, and of fp32 sums."""
    unit = 2e-6 if found.dtype == torch.float32 else 2**-8
    return bool(((found.double() - expected).abs() <= rounding * unit * (1e-2 + expected.abs()) + 4e-6).all())


@pytest.mark.usefixtures("way")
@settings(max_examples=examples(40))
@given(rows, widths, st.sampled_from(DTYPES))
def test_rms_norm(rows, width, dtype):
    torch.manual_seed(rows * 1000 + width)
    x, weight = (3 * torch.randn(1, rows, width)).to(dtype), torch.randn(width).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert close(found, expected)


@pytest.mark.usefixtures("way")
@settings(max_examples=examples(40))
@given(rows, widths, st.sampled_from(DTYPES))
def test_silu_mul(rows, width, dtype):
    torch.manual_seed(rows * 1000 + width)
    both = (6 * torch.randn(rows, 2 * width)).to(dtype)
    gate, up = both.double().chunk(2, -1)
    assert close(ops.silu_mul(both), gate * torch.sigmoid(gate) * up, rounding=2)


@pytest.mark.usefixtures("way")
def test_silu_of_extreme_values():
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4] * 4)
    found = ops.silu_mul(torch.cat((gate, torch.ones(24))))
    assert torch.allclose(found, gate.clamp_min(0), atol=1e-30)


@pytest.mark.usefixtures("way")
@settings(max_examples=examples(40))
@given(rows, st.integers(1, 5), st.integers(1, 70), st.sampled_from(DTYPES))
def test_rotate(rows, heads, half, dtype):
    """As complex numbers, and only the heads that were given: the values after them stay."""
    torch.manual_seed(rows * 1000 + half)
    everything = torch.randn(rows, heads + 2, 2 * half).to(dtype)
    before = everything.clone()
    angles = 100 * torch.rand(rows, half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    ops.rotate_(everything[:, :heads], cos, sin)
    wide = before[:, :heads].double()
    turned = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(
        torch.ones_like(angles).double(), angles.double()
    ).unsqueeze(1)
    assert close(everything[:, :heads], torch.cat((turned.real, turned.imag), -1))
    assert torch.equal(everything[:, heads:], before[:, heads:])


@pytest.mark.usefixtures("way")
@settings(max_examples=examples(40))
@given(rows, st.integers(1, 5), st.integers(1, 70), st.sampled_from(DTYPES))
def test_norm_of_heads(rows, heads, width, dtype):
    torch.manual_seed(rows * 1000 + width)
    everything, weight = torch.randn(rows, heads + 2, width).to(dtype), torch.randn(width).to(dtype)
    before = everything.clone()
    ops.norm_heads_(everything[:, 1 : heads + 1], weight, 1e-6)
    wide = before[:, 1 : heads + 1].double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert close(everything[:, 1 : heads + 1], expected)
    assert torch.equal(everything[:, 0], before[:, 0])
    assert torch.equal(everything[:, -1], before[:, -1])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_tensors_and_many_threads(dtype):
    with computing(2):
        x, weight = torch.randn(300, 700).to(dtype)[:, ::2], torch.randn(350).to(dtype)
        assert close(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x.double(), weight.double(), 1e-6))
        both = torch.randn(300, 1400).to(dtype)
        gate, up = both.double().chunk(2, -1)
        assert close(ops.silu_mul(both), gate * torch.sigmoid(gate) * up, rounding=2)


@pytest.mark.skipif(not ops.COMPILED, reason="built without a compiler")
def test_nan_stays_nan():
    for dtype in DTYPES:
        x = torch.full((1, 40), torch.nan).to(dtype)
        assert ops.rms_norm(x, torch.ones(40).to(dtype), 1e-6).isnan().all()
        assert ops.silu_mul(x).isnan().all()


@pytest.mark.skipif(not ops.COMPILED, reason="the kernel was not built")
@pytest.mark.parametrize("threads", [1, 3])
def test_read_benchmark_reads_every_byte(threads):
    numbers = torch.arange(6 * 64 * 3, dtype=torch.int32)  # whole vectors in every stream of every thread
    assert ops.kernel.read(numbers.data_ptr(), numbers.nbytes, threads) == int(numbers.sum())
    assert ops.kernel.read(numbers.data_ptr(), 0, threads) == 0
