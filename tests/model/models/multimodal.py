"""Tiny multimodal checkpoints, as the stock classes build and save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.gemma3n import modeling_gemma3n

from inlay.models.random import bytes_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
_PLE = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 262, "num_kv_shared_layers": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_QWEN_2 = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
_THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

#: Model type → settings of the whole checkpoint.
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": _TEXT | _MIXED, "vision_config": _VISION},
    "gemma3n": {
        "text_config": _TEXT | _MIXED | _PLE | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
        "audio_config": {"hidden_size": 16, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
    },
    "gemma4": {"text_config": _TEXT | _MIXED | _PLE | {"global_head_dim": 16}, "vision_config": _VISION},
    "gemma4_unified": {
        "text_config": _TEXT | _MIXED | {"global_head_dim": 16, "num_kv_shared_layers": 2},
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": None,
    },
    "idefics3": {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _VISION},
    "llama4": {
        "text_config": _TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 64},
        "vision_config": _VISION | {"vision_output_dim": 32, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
    },
    "qwen2_5_vl": {"text_config": _TEXT | _THREE, "vision_config": _QWEN | {"fullatt_block_indexes": [0]}},
    "qwen2_vl": {"text_config": _TEXT | _THREE, "vision_config": _QWEN_2},
    "qwen3_5": {"text_config": _TEXT | _LINEAR, "vision_config": _QWEN | {"num_position_embeddings": 16}},
    "qwen3_5_moe": {
        "text_config": _TEXT | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 16},
        "vision_config": _QWEN | {"num_position_embeddings": 16},
    },
    "qwen3_vl": {
        "text_config": _TEXT | _THREE,
        "vision_config": _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": _TEXT | _THREE | _EXPERTS,
        "vision_config": _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "smolvlm": {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _VISION},
}


def multimodal_model(kind: str, **more: Any) -> PreTrainedModel:
    """The stock multimodal model with random weights. more: settings of the whole checkpoint."""
    config = AutoConfig.for_model(kind, **CASES[kind], **more)
    torch.manual_seed(0)
    with patch.object(modeling_gemma3n.AutoModel, "from_config", _tower(modeling_gemma3n.AutoModel.from_config)):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in path:
                parameter.add_(0.2 * torch.randn_like(parameter))  # so that a norm that is left out shows
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model with a tokenizer. Returns the folder."""
    model.save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    return folder


def _tower(stock: Any) -> Any:
    """Replaces Gemma 3n's vision tower, which needs a package of its own, by one weight. Texts do not reach it."""

    def from_config(config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        return nn.Linear(4, 4) if config.model_type == "gemma3n_vision" else stock(config, *args, **kwargs)

    return from_config
