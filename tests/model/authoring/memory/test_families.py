"""Bytes counted from a configuration against what a real cache holds: transformers' own, and the engine's pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from inlay.attention.storage import LayerShape, bytes_per_token
from inlay.authoring.memory import CODECS, FAMILIES, attention_layer, shape_of
from inlay.engine.unshared_runner import returned_cache
from inlay.errors import ModelError
from inlay.models.families import FAMILIES as SERVED_FAMILIES
from tests.conftest import CONFIGS, tiny
from tests.model.families.configs import RECURRENT, tiny_config
from tests.raising import raises

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
EXPERTS: dict[str, Any] = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
MOE = EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
    "head_dim": 8,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
WINDOW: dict[str, Any] = {"sliding_window": 8}
PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
SHARED: dict[str, Any] = {
    **WINDOW,
    **PER_LAYER,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

#: Family and settings, beside COMMON.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bamba", {"attn_layer_indices": [1, 3], **MAMBA}),
    ("bloom", {"n_layer": 4, "n_head": 4}),
    ("cohere", {}),
    ("cohere2", WINDOW),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", LATENT),
    ("falcon", {"multi_query": True}),
    ("falcon", {"multi_query": False, "alibi": True, "num_kv_heads": None}),
    ("falcon_h1", {"mamba_d_ssm": 64, **MAMBA}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16, **WINDOW}),
    ("gemma3_text", {"head_dim": 16, **WINDOW}),
    ("gemma3n_text", {"intermediate_size": [64] * 4, "laurel_rank": 4, "activation_sparsity_pattern": None, **SHARED}),
    ("gemma4_text", {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, **SHARED}),
    ("gemma4_unified_text", {"global_head_dim": 32, "num_global_key_value_heads": 1, **SHARED}),
    ("glm4", {"head_dim": 8}),
    ("gpt2", GPT),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", GPT | {"multi_query": False, "head_dim": 16}),
    ("gpt_neox", {}),
    ("gpt_oss", {"head_dim": 16, **EXPERTS, **WINDOW}),
    ("granite", {}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2, **MAMBA, "num_local_experts": 0}),
    ("jamba", {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    ("lfm3", {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "head_dim": 8, **WINDOW}),
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
    ("llama4_text", {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8, "moe_layers": []}),
    ("mistral", WINDOW),
    ("mixtral", EXPERTS),
    ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 4}),
    ("olmo", {}),
    ("olmo2", {}),
    ("olmo3", WINDOW),
    ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("phi", {}),
    ("phi3", WINDOW),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2, **WINDOW}),
    ("qwen2_moe", MOE),
    ("qwen3", {"head_dim": 16}),
    ("qwen3_moe", MOE),
    (
        "qwen3_next",
        MOE
        | {"head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    ("smollm3", {}),
    ("stablelm", {}),
    ("starcoder2", WINDOW),
]


def cache_bytes(config: Any, tokens: int) -> int:
    """The bytes that a transformers model with random weights caches for a text of that many tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = returned_cache(model(torch.arange(tokens)[None] % 60 + 2, use_cache=True))
    kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor is not None)


@pytest.mark.parametrize(("family", "settings"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_counted_bytes_equal_a_transformers_cache(family, settings):
    config = AutoConfig.for_model(family, **(COMMON | settings))
    shape = shape_of(config)
    fp32 = CODECS["fp32"]
    assert shape.kind == family
    assert cache_bytes(config, 5) == 5 * shape.bytes_per_token(fp32) == shape.sequence_bytes(5, fp32)
    assert cache_bytes(config, 20) == shape.sequence_bytes(20, fp32)  # beyond the windows of 8


#: Served families that CASES does not have, one row each.
SERVED = sorted(set(SERVED_FAMILIES) - set(RECURRENT) - {family for family, _ in CASES})


@pytest.mark.parametrize("row", SERVED)
def test_counted_bytes_of_served_families_equal_a_transformers_cache(row):
    config = tiny_config(row)
    shape = shape_of(config)
    fp32 = CODECS["fp32"]
    assert cache_bytes(config, 5) == 5 * shape.bytes_per_token(fp32)
    assert cache_bytes(config, 40) == shape.sequence_bytes(40, fp32)  # beyond the windows of 24


def test_every_family_is_compared():
    assert {family for family, _ in CASES} | set(SERVED) == set(FAMILIES)


def test_falcon_is_counted_before_transformers_repeats_its_heads():
    config = AutoConfig.for_model("falcon", **(COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2}))
    shape = shape_of(config)
    assert shape.bytes_per_token(CODECS["fp32"]) == 4 * 2 * 2 * 8 * 4
    assert cache_bytes(config, 5) == 2 * 5 * shape.bytes_per_token(CODECS["fp32"])
    assert "which takes 2 times as much" in shape.notes[0]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_counted_bytes_equal_the_engines_pool(name):
    """The pool keeps every token in every layer, windows or not."""
    loaded = tiny(name)
    shapes = [LayerShape(layer.kv_heads, layer.head_dim) for layer in loaded.spec.layers]
    for codec, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert shape_of(loaded.model.config).bytes_per_token(CODECS[codec]) == bytes_per_token(shapes, dtype)


def test_layers_without_kv_are_noted():
    shared = shape_of(AutoConfig.for_model("gemma4_text", **(COMMON | dict(CASES)["gemma4_text"])))
    assert (len(shared.layers), shared.shared) == (2, 2)
    assert shared.notes == ("2 of 4 layers read the keys and values of earlier ones and keep none",)
    assert shared.layers == (attention_layer(2, 256, 8), attention_layer(1, 32))
    hybrid = shape_of(AutoConfig.for_model("jamba", **(COMMON | dict(CASES)["jamba"])))
    assert (len(hybrid.layers), hybrid.recurrent) == (2, 2)
    assert hybrid.notes[0].startswith("2 of 4 layers keep a state of fixed size")


def test_text_model_of_a_multimodal_checkpoint_is_counted():
    config = AutoConfig.for_model("gemma3", text_config=COMMON | {"head_dim": 16})
    assert shape_of(config).kind == "gemma3_text"
    assert shape_of(config).bytes_per_token(CODECS["bf16"]) == 4 * 2 * 2 * 16 * 2


def test_mla_latents_are_counted_as_stored():
    shape = shape_of(AutoConfig.for_model("deepseek_v3"))
    assert shape.bytes_per_token(CODECS["bf16"]) == 61 * (512 + 64) * 2
    assert "would take 40,960, which is 71 times as much" in shape.notes[0]


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("bert", {}, "models of type 'bert' have no KV cache: this is an encoder"),
        ("mamba", {}, "fold the whole text into one state of fixed size"),
        ("t5", {}, "models of type 't5' are encoder-decoders"),
        ("codegen", {}, "models of type 'codegen' are not counted: what they keep of a token has not been compared"),
        ("llama", {"num_key_value_heads": -2}, "cannot be counted: a number of heads, elements or positions is -2"),
        ("qwen2", {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3}, None),
        ("gemma2", {"sliding_window": None}, "cannot be counted: a number of heads, elements or positions is None"),
    ],
)
def test_uncountable_configurations_are_rejected(family, settings, reason):
    config = AutoConfig.for_model(family, **settings)
    if reason is None:
        assert len(shape_of(config).layers) == 3
        return
    with pytest.raises(ModelError, match=reason.replace("(", r"\(")):
        shape_of(config)


def test_layers_of_an_unknown_type_are_refused():
    config = AutoConfig.for_model("llama")
    config.layer_types = ["something_new"] * config.num_hidden_layers
    with raises("model.not_counted", ModelError, names="'something_new'"):
        shape_of(config)
    config.layer_types = ["full_attention"]
    with raises("model.unreadable_config", ModelError, names="32"):
        shape_of(config)


def test_a_configuration_of_several_decoders_is_refused():
    class Several:
        model_type = "several"

        def get_text_config(self, decoder: bool) -> None:
            raise ValueError("which one?")

    with raises("model.unreadable_config", ModelError, names="'several'"):
        shape_of(Several())
