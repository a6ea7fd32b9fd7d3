"""Quantized layers: the bound that rounding gives, the same answer for few rows and many, and models made of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inlay import LLM, ParameterError, SamplingParams
from inlay.models import ops, quantize
from inlay.models.compiled_weight import can_compile
from inlay.models.formats.stored import GROUP
from inlay.models.load import load_model
from inlay.models.quantize import Int4Linear, Int8Linear, int4
from inlay.models.weights import WeightForm
from tests.conftest import FAMILIES, tiny
from tests.generated import examples
from tests.model.models.prepared import prepared
from tests.raising import raises

DTYPES = (torch.float32, torch.bfloat16)
ROWS = (0, 1, 2, 12, 13, 24, 25, 70)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def weight_of(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight that a layer computes with, read off by multiplying with ones at single places."""
    places = torch.eye(layer.in_features, dtype=dtype)
    return torch.cat([layer(place[None]) for place in places]).T.double()


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs + inputs)
    scale = 10 ** torch.linspace(-3, 1, outputs)[:, None]
    return (torch.randn(outputs, inputs, generator=generator) * scale + scale / 3).to(dtype)


@pytest.fixture(params=["compiled", "pytorch"])
def way(request, monkeypatch):
    """Both ways through these layers: the compiled kernel, and PyTorch's own where there is none."""
    if request.param == "pytorch":
        monkeypatch.setattr(quantize, "can_compile", lambda dtype: False)
    elif not can_compile(torch.float32):
        pytest.skip("no compiled kernel for 4 and 8 bits here")
    return request.param


class Products(TorchDispatchMode):
    """Notes every operation that reads or makes as much as a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.large = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in (*args, found) if isinstance(each, torch.Tensor)]
        self.large += max(sizes, default=0) >= self.size
        return found


@pytest.fixture
def pytorch(monkeypatch):
    monkeypatch.setattr(quantize, "can_compile", lambda dtype: False)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_no_rows_give_no_rows(kind, way):
    assert kind(weights(128, 64, torch.float32))(torch.zeros(1, 0, 64)).shape == (1, 0, 128)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_no_rows_convert_no_weights(kind, pytorch):
    """A pass in which no prompt ends has no row for the output head, which may be a third of the weights."""
    layer = kind(weights(128, 64, torch.float32))
    with Products(128 * 64 // 4) as none:  # 4-bit weights are packed
        assert layer(torch.zeros(1, 0, 64)).shape == (1, 0, 128)
    with Products(128 * 64 // 4) as some:
        assert layer(torch.ones(1, 30, 64)).shape == (1, 30, 128)
    assert (none.large, some.large > 0) == (0, True)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(DTYPES))
def test_int8_rounds_to_half_a_step(way, outputs, inputs, dtype):
    weight = weights(outputs, inputs, dtype)
    step = weight.double().abs().amax(1, keepdim=True) / 127
    slack = 1e-6 if dtype == torch.float32 else 2**-7
    error = (weight_of(Int8Linear(weight), dtype) - weight.double()).abs()
    assert (error <= step / 2 + slack * weight.double().abs().amax(1, keepdim=True)).all()


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from(DTYPES))
def test_int4_rounds_to_half_a_step(way, blocks, groups, dtype):
    weight = weights(64 * blocks, GROUP * groups, dtype)
    by_group = weight.double().unflatten(1, (groups, GROUP))
    low, high = by_group.amin(2, keepdim=True), by_group.amax(2, keepdim=True)
    slack = 1e-5 if dtype == torch.float32 else 2**-6
    found = weight_of(Int4Linear(weight), dtype).unflatten(1, (groups, GROUP))
    assert ((found - by_group).abs() <= (high - low) / 30 + slack * torch.maximum(low.abs(), high.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("biased", [False, True])
def test_result_does_not_depend_on_the_number_of_rows(kind, dtype, biased, way, monkeypatch):
    """In PyTorch, few rows go through its kernels and many through a converted weight, stretch by stretch."""
    monkeypatch.setattr(quantize, "STRETCH", 1 << 14)
    weight, bias = weights(192, 96, dtype), torch.randn(192).to(dtype) if biased else None
    layer = kind(weight, bias)
    used = weight_of(kind(weight), dtype)
    for rows in ROWS:
        x = torch.randn(1, rows, 96).to(dtype)
        found = layer(x)
        expected = x.double() @ used.T + (0 if bias is None else bias.double())
        assert found.shape == (1, rows, 192)
        assert found.dtype == dtype
        unit = 1e-5 if dtype == torch.float32 else 2**-7  # relative to the sum: a converted weight is rounded once more
        unit += 2**-15 if way == "compiled" else 0  # and so are inputs, to 16 bits
        assert ((found.double() - expected).abs() <= unit * (x.double().abs() @ used.T.abs() + expected.abs())).all()


@pytest.fixture
def untried():
    """Resets the cached test of whether 4-bit weights can be read."""
    quantize.can_unpack.cache_clear()
    yield
    quantize.can_unpack.cache_clear()


@pytest.mark.parametrize("compiled", [False, ops.COMPILED])
def test_int4_is_equal_with_and_without_fast_unpacking(compiled, untried, pytorch, monkeypatch):
    monkeypatch.setattr(ops, "COMPILED", compiled)
    layer, x = Int4Linear(weights(128, 64, torch.float32)), torch.randn(60, 64)
    assert torch.allclose(layer(x), x @ weight_of(layer, torch.float32).T.float(), atol=1e-3)
    blocks_of_64 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # PyTorch packs by the width of its vectors
    assert quantize.can_unpack(torch.float32) == (compiled and blocks_of_64)


@pytest.mark.skipif(not ops.COMPILED, reason="built without a compiler")
def test_unknown_packing_order_is_detected(untried, monkeypatch):
    """The layout is PyTorch's own affair; where it differs, its own kernel does all the work."""
    pack = quantize.int4_pack
    monkeypatch.setattr(quantize, "int4_pack", lambda numbers, tiles: pack(numbers.flip(0), tiles))
    assert not quantize.can_unpack(torch.float32)


def test_a_weight_of_equal_numbers(way):
    for weight in (torch.zeros(64, 64), torch.full((64, 64), 0.75), torch.full((64, 64), -3.0)):
        for kind in (Int8Linear, Int4Linear):
            found = weight_of(kind(weight), torch.float32)
            assert torch.allclose(found, weight.double(), rtol=1e-2)


def test_weights_of_odd_sizes_keep_8_bits():
    assert isinstance(int4(torch.randn(64, GROUP), None), Int4Linear)
    assert isinstance(int4(torch.randn(63, GROUP), None), Int8Linear)
    assert isinstance(int4(torch.randn(64, GROUP + 1), None), Int8Linear)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, quantization):
    """The head keeps 8 bits; answers come, and are those of a batch of any size."""
    loaded = prepared(name, WeightForm(quantization=quantization), torch.bfloat16)
    kinds = {type(module) for module in loaded.model.modules()}
    assert isinstance(loaded.model.lm_head, Int8Linear)
    assert not kinds & {nn.Linear}
    assert (Int4Linear in kinds) == (quantization == "int4")
    llm = LLM(loaded, kv_memory="16MiB")
    (output,) = llm.generate("Some words to go on from.", GREEDY)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_stays_near_the_stock_model(name):
    """Measured in fp32: relative errors of logits from 0.016 to 0.070 with int8, and from 0.09 to 0.43 with int4.

    These models have large weights, so that attention is sharp, and few of them to average over.
    """
    ids = torch.randint(0, 200, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        truth = tiny(name).model(ids, use_cache=False).logits
        for quantization, bound in (("int8", 0.09), ("int4", 0.6)):
            model = prepared(name, WeightForm(quantization=quantization), torch.float32).model
            assert (model(ids, use_cache=False).logits - truth).norm() < bound * truth.norm()


def test_quantized_demo_has_a_bounded_logit_error():
    """Measured: relative error of logits 0.02 with int8 and 0.1 with int4; docs/guides/weights.md has answers."""
    stock = load_model("demo", weights="stock")
    text = "What is the fee of the ferry to Asha? The ferry to Asha takes 40 minutes and costs 3 coins. " * 3
    ids = torch.tensor([stock.tokenizer.encode(text)])
    with torch.inference_mode():
        truth = stock.model(ids, use_cache=False).logits
        for quantization, bound in (("int8", 0.05), ("int4", 0.25)):
            model = load_model("demo", quantization=quantization).model
            error = (model(ids, use_cache=False).logits - truth).norm() / truth.norm()
            assert error < bound


def test_fingerprints_differ_between_quantizations():
    forms = [
        WeightForm(),
        WeightForm(weights="stock"),
        WeightForm(quantization="int8"),
        WeightForm(quantization="int4"),
    ]
    prints = [prepared("llama", form).fingerprint for form in forms]
    assert prints[0] == prints[1] == tiny("llama").fingerprint
    assert len(set(prints)) == 3
    assert load_model("random:tiny", quantization="int4").fingerprint != load_model("random:tiny").fingerprint


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_original_weight_is_unchanged(kind, way):
    """Where the head is tied it is the embedding's too."""
    for dtype in DTYPES:
        weight = weights(64, 64, dtype)
        kind(weight)
        assert torch.equal(weight, weights(64, 64, dtype))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quantization": "int2"}, "quantization is 'int2'; use one of int8, int4, or None"),
        ({"weights": "folded"}, "weights is 'folded'; use one of packed, stock"),
        ({"weights": "stock", "quantization": "int8"}, 'quantization replaces the stock layers; leave out weights="st'),
    ],
)
def test_invalid_settings_are_rejected(settings, sentence):
    for make in (LLM, load_model):
        with pytest.raises(ParameterError, match=sentence):
            make("random:tiny", **settings)


def test_loaded_model_rejects_loading_options():
    for name, value in (("weights", "stock"), ("quantization", "int8")):
        with raises("parameter.conflict", ParameterError, names=str(name)):
            LLM(tiny("llama"), **{name: value})
    assert LLM(tiny("llama"), kv_memory="16MiB").loaded is tiny("llama")
