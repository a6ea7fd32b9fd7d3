"""Packed linear layers against nn.Linear, and the fallback where packing is impossible."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from inlay import ModelError
from inlay.attention.kernel import kernel
from inlay.models import linear
from inlay.models.linear import (
    DirectLinear,
    PackedLinear,
    can_multiply,
    can_pack,
    joined,
    of_conv1d,
    packed,
    padded_rows,
    stock,
)
from tests.generated import examples
from tests.raising import raises
from tests.threads import computing

DTYPES = (torch.float32, torch.bfloat16)
sizes = st.integers(1, 70)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    expected = exact(x, weight, bias)
    if found.dtype == torch.float32:  # a sum is rounded by the size of its parts
        bound = 1e-6 * (1 + exact(x.abs(), weight.abs(), None if bias is None else bias.abs()))
    else:
        bound = 2**-7 * (1 + expected.abs())
    return bool(((found.double() - expected).abs() <= bound).all())


@settings(max_examples=examples(40))
@given(st.data(), sizes, sizes, st.booleans(), st.sampled_from(DTYPES))
def test_packed_layers_equal_linear_layers(data, inputs, outputs, biased, dtype):
    if not can_pack(dtype):
        pytest.skip("oneDNN does not compute in this dtype here")
    shape = (*data.draw(st.lists(st.integers(0, 5), max_size=2)), inputs)
    torch.manual_seed(inputs * 100 + outputs)
    x, weight = torch.randn(shape).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    layer = PackedLinear(weight, bias)
    found = layer(x)
    assert found.shape == (*shape[:-1], outputs)
    assert found.dtype == dtype
    assert close(found, x, weight, bias)
    assert (layer.in_features, layer.out_features) == (inputs, outputs)


def test_few_numbers_of_rows_are_multiplied():
    sizes = [padded_rows(rows) for rows in range(4097)]
    assert sizes[:10] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert all(rows <= size <= rows * 1.25 for rows, size in enumerate(sizes))
    assert all(size <= rows * 1.125 for rows, size in enumerate(sizes) if rows > 128)
    assert len(set(sizes)) <= 70


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_of_a_packed_layer_does_not_depend_on_padding(dtype):
    if not can_pack(dtype):
        pytest.skip("oneDNN does not compute in this dtype here")
    torch.manual_seed(0)
    x, layer = torch.randn(80, 48).to(dtype), PackedLinear(torch.randn(32, 48).to(dtype))
    for rows in (9, 33, 65, 79):
        assert layer(x[:rows]).equal(layer(x[: padded_rows(rows)])[:rows])


def each_version(test):
    """Run a test with every version of the kernel that runs here, in its dtypes."""
    versions = [(name, dtype) for name in ("avx512bf16", "avx512", "avx2", "portable") for dtype in DTYPES]
    there = hasattr(kernel, "linear_supported")
    runs = [one for one in versions if there and kernel.linear_supported(one[0], one[1] == torch.bfloat16)]
    return pytest.mark.parametrize(("instruction_set", "dtype"), runs)(test)


needs_kernel = pytest.mark.skipif(
    not can_multiply(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no kernel for bf16 on this processor"
)


@each_version
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 140), st.integers(1, 300), st.integers(1, 120), st.booleans(), st.integers(1, 3))
def test_direct_layers_equal_linear_layers(instruction_set, dtype, rows, inputs, outputs, biased, threads):
    """Odd sizes, all ways through the kernels (few rows, tiles, several blocks of inputs), rows that lie apart."""
    torch.manual_seed(inputs * 100 + outputs)
    x = torch.randn(rows, inputs + 3).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    with computing(threads):
        found = DirectLinear(weight, bias, instruction_set)(x)
    assert (found.shape, found.dtype) == ((rows, outputs), dtype)
    assert close(found, x, weight, bias)


@each_version
@pytest.mark.parametrize(("rows", "inputs"), [(1100, 40), (2, 2500), (4, 2500), (16, 2500), (48, 2499), (60, 2500)])
def test_direct_layers_take_many_rows_and_many_inputs(instruction_set, dtype, rows, inputs):
    torch.manual_seed(2)
    outputs = 50 if rows > 100 else 1001  # so many that other threads are worth waking
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    with computing(2):
        assert close(DirectLinear(weight, None, instruction_set)(x), x, weight, None)


@each_version
@pytest.mark.parametrize("rows", [1, 3, 5, 9, 24, 48, 60])
def test_answers_of_direct_layers_do_not_depend_on_the_threads(instruction_set, dtype, rows):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 896).to(dtype), torch.randn(3001, 896).to(dtype)  # other threads are worth waking
    found = []
    for threads in (1, 2, 3):
        with computing(threads):
            found.append(DirectLinear(weight, None, instruction_set)(x))
    assert found[1].equal(found[0])
    assert found[2].equal(found[0])


@each_version
@pytest.mark.parametrize("inputs", [33, 896, 1217, 4864])
def test_a_row_has_the_same_bits_alone_and_with_a_draft(instruction_set, dtype, inputs):
    torch.manual_seed(inputs)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((24, inputs), (1001, inputs), (1001,)))
    layer = DirectLinear(weight, bias, instruction_set)
    with computing(2):
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in range(2, 25):
            assert layer(x[:rows]).equal(alone[:rows]), rows


@needs_kernel
def test_direct_layers_share_the_weight_and_take_any_shape():
    weight = torch.randn(5, 6).bfloat16()
    layer = packed(weight, None)
    assert isinstance(layer, DirectLinear)
    x = torch.randn(2, 3, 6).bfloat16()
    assert layer(x).shape == (2, 3, 5)
    expected = layer(x) * 2
    weight *= 2  # nothing was copied: a tied head costs no memory
    assert torch.equal(layer(x), expected)


@needs_kernel
@pytest.mark.parametrize("x", [torch.ones(2, 6), torch.ones(3, 4).bfloat16(), torch.ones(12).bfloat16()])
def test_direct_layers_refuse_other_inputs(x):
    """Their kernel gets an address: another dtype or width would be read as if it were right."""
    with pytest.raises(ValueError, match=r"a torch\.bfloat16 layer of 6 inputs got"):
        DirectLinear(torch.ones(5, 6).bfloat16())(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_need_not_be_contiguous(dtype):
    x, weight = torch.randn(6, 40).to(dtype)[::2, ::2], torch.randn(8, 20).to(dtype)
    assert close(packed(weight, None)(x), x, weight, None)


def test_unpackable_layer_stays_stock(monkeypatch):
    weight = torch.randn(4, 3, dtype=torch.float64)
    layer = packed(weight, None)
    assert type(layer) is nn.Linear
    assert torch.equal(layer(torch.ones(2, 3).double()), nn.functional.linear(torch.ones(2, 3).double(), weight))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(linear, "can_multiply", lambda weight: False)
    assert type(packed(weight.float(), weight[:, 0].float())) is nn.Linear
    assert type(packed(weight.bfloat16().t(), None)) is nn.Linear, "its blocks do not lie together"


def test_several_layers_are_joined_into_one():
    layers = [nn.Linear(6, size, bias=size != 4) for size in (3, 4, 5)]
    x = torch.randn(2, 6)
    expected = torch.cat([layer(x) for layer in layers], -1)
    both = joined(layers, packed)
    assert torch.allclose(both(x), expected, atol=1e-6)
    assert all(layer.weight is None for layer in layers), "the originals hold their weights still"


def test_a_tied_weight_stays_with_the_embedding():
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    layer = joined([head], packed)
    assert torch.allclose(layer(embedding(torch.tensor([3]))), embedding.weight[3:4] @ embedding.weight.T, atol=1e-6)


def test_gpt2s_transposed_layers():
    layer = Conv1D(5, 3)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 3)
    expected = layer(x)
    assert torch.allclose(of_conv1d(layer, packed)(x), expected, atol=1e-6)


def test_packed_weights_are_never_lost_in_silence():
    layer = PackedLinear(torch.randn(4, 3))
    for use in (lambda: copy.deepcopy(layer), lambda: torch.save(layer, io.BytesIO()), layer.state_dict):
        with raises("model.packed_weights", ModelError):
            use()


def test_stock_layers_keep_the_very_weight():
    weight, bias = torch.randn(4, 3), torch.randn(4)
    layer = stock(weight, bias)
    assert layer.weight.data_ptr() == weight.data_ptr()
    assert torch.equal(layer(torch.ones(3)), nn.functional.linear(torch.ones(3), weight, bias))
