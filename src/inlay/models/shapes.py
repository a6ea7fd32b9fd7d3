"""Named architectures with random weights, for measuring speed where no checkpoint can be had.

``random:qwen2.5-0.5b`` has the shape of Qwen2.5-0.5B and random weights, so its answers mean nothing, and it takes
exactly as long as the real one. The tokenizer is one byte a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inlay.errors import ModelError

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_SCALING,
        "tie_word_embeddings": True,
    },
    "llama-2-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "mha-0.4b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    # Loads in no time: for trying commands out.
    "tiny": {
        "model_type": "llama",
        "vocab_size": 262,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def build_random(shape: str, dtype: torch.dtype, seed: int, *, bos: int, eos: int) -> PreTrainedModel:
    """A model of a named shape with random weights; the same seed gives the same weights. Raises ModelError.

    bos, eos: the ids that begin and end a text, in place of those that the configuration's class assumes.
    """
    check_shape(shape)
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, bos_token_id=bos, eos_token_id=eos)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    model.tie_weights()
    _fill(model, seed)
    for module in model.modules():
        if hasattr(module, "rotary_emb"):  # its frequencies are computed, and were lost on the meta device
            module.rotary_emb = type(module.rotary_emb)(config=config)
    return model.eval()


def check_shape(shape: str) -> None:
    """Raise ModelError for a shape that is not known."""
    if shape not in SHAPES:
        raise ModelError(f"random:{shape} is not a known shape; use one of {', '.join(sorted(SHAPES))}")


def _fill(model: nn.Module, seed: int) -> None:
    """Fill weights from one block of normal noise, as fast as memory allows: 7 billion fresh draws take minutes."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1 << 24, generator=generator)
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters()}
    for parameter in model.parameters():
        if id(parameter) in norms:
            nn.init.ones_(parameter)
        elif parameter.dim() < 2:
            nn.init.zeros_(parameter)
        else:
            _fill_from(parameter.data, noise, generator)


def _fill_from(weight: torch.Tensor, noise: torch.Tensor, generator: torch.Generator) -> None:
    scaled = (noise * weight.shape[-1] ** -0.5).to(weight.dtype)
    flat, at = weight.view(-1), 0
    while at < flat.numel():
        offset = int(torch.randint(0, noise.numel() // 2, (1,), generator=generator))
        piece = scaled[offset : offset + min(flat.numel() - at, noise.numel() // 2)]
        flat[at : at + piece.numel()] = piece
        at += piece.numel()
