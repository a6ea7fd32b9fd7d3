"""Models with fused layers against the stock models."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.activations import ACT2FN

from inlay import LLM, SamplingParams
from inlay.models import ops
from inlay.models.fused import FusedAttention, FusedMLP, FusedNorm, FusedRotary
from inlay.models.interface import attention_implementation
from inlay.models.linear import DirectLinear, PackedLinear, can_multiply, can_pack, packed
from inlay.models.weights import WeightForm, parts, prepare
from tests.conftest import CONFIGS, tiny
from tests.model.equivalence.oracle import prefill
from tests.model.models.prepared import in_dtype, prepared

IDS = [int(i) for i in torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(3))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def logits_of(model, ids=IDS, **more):
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False, **more).logits[0]


@pytest.mark.parametrize("compiled", [False, ops.COMPILED])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_equal_the_stock_models(name, compiled, monkeypatch):
    monkeypatch.setattr(ops, "COMPILED", compiled)
    assert (logits_of(prepared(name).model) - logits_of(tiny(name).model)).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(CONFIGS))
def test_in_bf16_no_less_accurate_than_stock(name):
    truth = logits_of(tiny(name).model)
    stock = logits_of(in_dtype(name, torch.bfloat16)).float()
    fused = logits_of(prepared(name, dtype=torch.bfloat16).model).float()
    assert (fused - truth).norm() <= 1.1 * (stock - truth).norm()


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.skipif(not can_pack(torch.float32), reason="PyTorch was built without oneDNN")
def test_every_product_is_packed(name):
    model = prepared(name).model
    kinds = {type(module) for module in model.modules()}
    assert (DirectLinear if can_multiply(torch.zeros(1, 1)) else PackedLinear) in kinds
    assert not kinds & {nn.Linear}
    assert not any(kind.__name__ == "Conv1D" for kind in kinds)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_whole_engine_gives_the_stock_models_answer(name):
    packed_llm, stock_llm = (LLM(loaded, kv_memory="16MiB", seed=0) for loaded in (prepared(name), tiny(name)))
    (one,), (other,) = (llm.generate([IDS], GREEDY) for llm in (packed_llm, stock_llm))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    answer = list(one.outputs[0].token_ids)
    steps = prefill(tiny(name), IDS + answer[:-1])[-len(answer) :]
    assert steps.argmax(-1).tolist() == answer


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_transformers_can_still_run_the_model(name, implementation):
    """Its own attention, its cache and its generate; several rows at one set of positions."""
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([IDS[:20], IDS[20:40]])
    answers = []
    for model in (prepared(name).model, tiny(name).model):
        with attention_implementation(model, implementation), torch.inference_mode():
            answers.append(model.generate(ids, generation_config=config, past_key_values=DynamicCache()))
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_attention_reads_a_cache_under_either_name(name):
    """transformers 5.24 calls it ``cache``; earlier releases call it ``past_key_values``."""
    model = prepared("llama").model
    attention, rows = model.model.layers[0].self_attn, torch.randn(1, 4, 32)
    tables = model.model.rotary_emb(rows, torch.arange(4)[None])
    with torch.inference_mode(), attention_implementation(model, "sdpa"):
        whole, _ = attention(rows, tables, None)
        kept = DynamicCache()
        attention(rows[:, :3], tuple(each[:, :3] for each in tables), None, **{name: kept})
        last, _ = attention(rows[:, 3:], tuple(each[:, 3:] for each in tables), None, **{name: kept})
    assert kept.get_seq_length() == 4
    torch.testing.assert_close(last, whole[:, 3:], atol=1e-5, rtol=0)


def test_activations_other_than_silu():
    mlp = tiny("llama").model.model.layers[0].mlp
    stock = type(mlp)(tiny("llama").model.config)
    stock.act_fn = ACT2FN["gelu"]
    x = torch.randn(3, 32)
    with torch.inference_mode():
        expected = stock(x)
        assert torch.allclose(FusedMLP(stock, packed)(x), expected, atol=1e-6)


def test_the_rotary_table_stays_in_fp32():
    """bfloat16 holds 8 bits of an angle's cosine; a stored key would carry that error wherever it is read."""
    stock = tiny("llama").model.model.rotary_emb
    positions = torch.arange(3000)[None]
    cos, sin = FusedRotary(stock)(torch.empty(0, dtype=torch.bfloat16), positions)
    angles = positions[0, :, None].double() * stock.inv_freq.double().repeat(2)
    assert (cos[0] - angles.cos()).abs().max() < 1e-3
    assert (sin[0] - angles.sin()).abs().max() < 1e-3


def test_original_weights_are_freed():
    model = in_dtype("qwen2", torch.float32)
    alive = weakref.WeakSet(p for n, p in model.named_parameters() if n.endswith("_proj.weight") or "lm_head" in n)
    assert len(alive) == 22
    prepare(model, WeightForm())
    gc.collect()
    assert len(alive) == 0


@pytest.mark.parametrize("name", list(CONFIGS))
def test_parts_contain_every_weight_once(name):
    model = tiny(name).model
    listed = dict.fromkeys(id(p) for _, part in parts(model) for p in part.parameters())  # tied ones come twice
    assert list(listed) == [id(p) for p in model.parameters()]
    for path, part in parts(model):
        assert model.get_submodule(path) is part


def test_a_packed_model_asks_for_no_gradients():
    """Its steps compute in place, which would be an error where gradients are recorded."""
    model = prepared("qwen3").model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model(torch.tensor([IDS]), use_cache=False).logits.requires_grad


def test_replaced_modules_are_as_documented():
    model = prepared("qwen3").model
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn, FusedAttention)
    assert isinstance(layer.mlp, FusedMLP)
    assert isinstance(model.model.norm, FusedNorm)
    assert isinstance(model.model.embed_tokens, nn.Embedding)
