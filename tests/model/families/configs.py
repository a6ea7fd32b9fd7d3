"""A tiny configuration of every causal family of transformers: settings that its checkpoints vary in, made small."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from inlay.models.families import FAMILIES, describe
from inlay.models.load import LoadedModel
from inlay.models.shapes import bytes_tokenizer
from inlay.models.weights import STOCK, WeightForm, prepare
from tests.model.api.tool_templates import tool_tokenizer

LAYERS, WINDOW = 4, 24

#: Under all the names that families have for a number; each takes those it knows.
COMMON: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "sliding_window": WINDOW,
}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 4096}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}

_GEMMA4: dict[str, Any] = _MIXED | {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 262,
    "head_dim": 8,
    "global_head_dim": 16,
}
_GEMMA4_ONE_PRODUCT = _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_GRANITE4: dict[str, Any] = _MAMBA2 | {
    "layer_types": ["attention"] * LAYERS,
    "position_embedding_type": "rope",
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 64,
    "logits_scaling": 4.0,
}

#: Settings of a model type beside COMMON. Several rows of a family have names of their own: "falcon alibi".
SPECIAL: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
    "codellama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_key_value_heads": 4},
    "llama-2": {"num_key_value_heads": 4},
    "cohere2": _MIXED | {"logit_scale": 1.0},
    "cohere2_moe": _MIXED | {"head_dim": 8, "logit_scale": 1.0},
    "cwm": _MIXED | {"eos_token_id": [258]},
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "exaone4": _MIXED,
    "exaone_moe": _MIXED,
    "falcon": {"multi_query": True},
    "falcon alibi": {"alibi": True, "multi_query": False, "num_kv_heads": None},
    "falcon new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, **_MIXED},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, **_MIXED},
    "gemma3n_text": _MIXED
    | {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 262,
        "head_dim": 8,
        "laurel_rank": 8,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "gemma4_text dense": _GEMMA4_ONE_PRODUCT,
    "gemma4_unified_text": _GEMMA4_ONE_PRODUCT | {"num_kv_shared_layers": 2},
    "gemma4_text moe": _GEMMA4_ONE_PRODUCT | {"enable_moe_block": True, "top_k_experts": 2},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_bigcode heads": _GPT | {"multi_query": False},
    "hy_v3": {"head_dim": 8},
    "internlm3": {"head_dim": 8},
    "iquestcoder": {"head_dim": 8},
    "kolibri1": {"head_dim": 8},
    "laguna": {"head_dim": 8},
    "mellum": {"head_dim": 8},
    "minimax_m2": {"head_dim": 8},
    "ministral3": {"head_dim": 8},
    "solar_open": {"head_dim": 8},
    "granite_swa": _MIXED,
    "granitemoehybrid attention": _GRANITE4,
    "granitemoehybrid experts": _GRANITE4
    | {"position_embedding_type": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe_swa": _MIXED | {"logits_scaling": 4.0},
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "qwen2 windows": {"use_sliding_window": True, **_MIXED},
    "gpt_oss": {"head_dim": 16, **_MIXED},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": [2] * LAYERS, "num_shared_expert": [1] * LAYERS},
    "ministral": {"head_dim": 8, **_MIXED},
    "minicpm3": _LATENT,
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 4096},
    "olmo3": _MIXED,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi3": {},
    "phi3 longrope": {
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 4096,
            "factor": 2.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
    "llama dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "cohere": {"logit_scale": 1.0},
    "granitemoe": {"logits_scaling": 4.0},
    "granitemoeshared": {"logits_scaling": 4.0},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0] * (LAYERS // 2)},
    "vaultgemma": {"head_dim": 16, "query_pre_attn_scalar": 16, **_MIXED},
    "youtu": _LATENT,
    "axk1": _LATENT,
    "glm4_moe_lite": _LATENT,
}


_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}

#: The same of families with recurrent or convolution layers.
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3], "attn_rotary_emb": 8},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8},
    "falcon_mamba": {"state_size": 8, "intermediate_size": 64},
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["mamba", "attention"] * (LAYERS // 2), "logits_scaling": 4.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "kimi_linear": _LATENT
    | {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2), "linear_num_heads": 4}
    | {"linear_head_dim": 8, "linear_conv_kernel_dim": 4},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "head_dim": 8},
    "mamba": {"state_size": 8, "intermediate_size": 64},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 8,
    },
    "olmo_hybrid": _DELTA | {"linear_num_value_heads": 2},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 16,
        "chunk_size": 16,
        "adapter_rank": 8,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "num_mem_blocks": 2,
        "initializer_range": 0.1,  # larger weights amplify rounding beyond 1e-4 in the stock model itself
    },
}

#: The same of models that are served without reuse.
UNSHARED: dict[str, dict[str, Any]] = {
    "codegen": _GPT | {"rotary_dim": 8, "n_ctx": 4096},
    # It keeps all keys: among those whose score is 0, stock code itself takes others in pieces than whole.
    "deepseek_v32": _LATENT | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 128},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 4096,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": LAYERS, "num_heads": 4, "window_size": 24},
    "gptj": _GPT | {"rotary_dim": 8},
}

#: Every model type with modules, and the further rows.
ROWS = tuple(sorted({*FAMILIES, *SPECIAL} - {*UNSHARED, *RECURRENT}))


def model_type(name: str) -> str:
    """The model type of a row: its first word."""
    return {"codellama": "llama", "llama-2": "llama"}.get(name, name.partition(" ")[0])


def tiny_config(name: str, **more: Any) -> PretrainedConfig:
    """The tiny configuration of a row, or of any model type that needs none. more: further settings."""
    settings = COMMON | _EXPERTS | SPECIAL.get(name, {}) | RECURRENT.get(name, {}) | UNSHARED.get(name, {}) | more
    if "sliding_window" not in CONFIG_MAPPING[model_type(name)].__dataclass_fields__:
        del settings["sliding_window"]  # some code looks whether it is there, and no checkpoint has it
    return AutoConfig.for_model(model_type(name), **settings)


def stock_model(name: str, **more: Any) -> PreTrainedModel:
    """The stock model with random weights, large enough for attention to matter."""
    config = tiny_config(name, **more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "sink" in path:  # made with torch.empty, or as zeros
                parameter.normal_()
            elif parameter.dim() == 1 and "norm" in path.lower():
                parameter.add_(0.2 * torch.randn_like(parameter))  # so that a norm that is left out shows
            elif path.endswith("A_log"):  # decays that neither forget nor keep all
                parameter.uniform_(-3, 0.5)
            elif path.endswith("dt_bias"):
                parameter.uniform_(-2, 1)
    return model


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Its weights rounded; buffers, such as rotary frequencies, stay in fp32 as they do on loading."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@cache
def tiny_bfloat16(name: str) -> LoadedModel:
    """The tiny model in bfloat16, packed as models are by default."""
    model, form = in_bfloat16(stock_model(name)), WeightForm()
    key = prepare(model, form)
    return LoadedModel(f"tiny-{name}", model, bytes_tokenizer(), describe(model), key, form=form)


def tiny_with_tools(name: str) -> LoadedModel:
    """A tiny model whose chat template shows tools, with the tokens that this template has."""
    tokenizer = tool_tokenizer("qwen")
    model = stock_model(name, vocab_size=len(tokenizer), vocab_size_per_layer_input=len(tokenizer))
    return LoadedModel(f"tiny-{name}", model, tokenizer, describe(model), prepare(model, STOCK))


@cache
def tiny(name: str, form: WeightForm = STOCK) -> LoadedModel:
    """A tiny model in fp32 with one token a byte, in a form; the same object at every call."""
    model = stock_model(name)
    key = prepare(model, form)
    return LoadedModel(f"tiny-{name}", model, bytes_tokenizer(), describe(model), key, form=form)
