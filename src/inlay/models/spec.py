"""What inlay knows of each model family: which are supported, and the shape and position scheme of their layers.

Everything that is not on the list is refused with a reason, because a model whose attention does not go through
``transformers``' AttentionInterface, or that ignores ``position_ids``, would give wrong answers without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from inlay.attention.rope import Rotary
from inlay.errors import ModelError

#: Rotary scalings whose frequencies do not depend on the longest position in a forward pass.
_FIXED_SCALINGS = ("default", "linear", "llama3", "yarn")
_MOVING_SCALINGS = ("dynamic", "longrope")


@dataclass(frozen=True)
class LayerSpec:
    """The keys and values of one layer, and their positions. What else its attention needs, the layer says itself.

    rotary: None where positions are not rotary.
    """

    kv_heads: int
    head_dim: int
    rotary: Rotary | None


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of inlay needs to know of a model."""

    family: str
    layers: tuple[LayerSpec, ...]
    max_positions: int
    vocab_size: int

    @property
    def rotary(self) -> bool:
        """Whether every layer's positions are rotary, so that a shift can be a turn of the query."""
        return all(layer.rotary is not None for layer in self.layers)


def describe(model: PreTrainedModel) -> ModelSpec:
    """The ModelSpec of a loaded model. Raises ModelError for what is not supported."""
    check_config(model.config)
    return ModelSpec(
        family=model.config.model_type,
        layers=_FAMILIES[model.config.model_type](model),
        max_positions=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
    )


def check_config(config: PretrainedConfig) -> None:
    """Raise ModelError, with the reason, if a model of this configuration cannot be served."""
    family = config.model_type
    if family not in _FAMILIES:
        raise ModelError(
            f"models of type '{family}' are not supported: inlay has not verified their attention and positions; "
            f"use one of {', '.join(sorted(_FAMILIES))}"
        )
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if scaling in _MOVING_SCALINGS:
        raise ModelError(
            f"rotary scaling '{scaling}' is not supported: it chooses its frequencies from the longest position in "
            "a forward pass, so stored attention states would not fit later ones"
        )
    if scaling not in _FIXED_SCALINGS:
        raise ModelError(f"rotary scaling '{scaling}' is not supported; use one of {', '.join(_FIXED_SCALINGS)}")
    if getattr(config, "reorder_and_upcast_attn", False) or getattr(config, "add_cross_attention", False):
        raise ModelError("GPT-2 with reorder_and_upcast_attn or add_cross_attention is not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("quantized checkpoints are not supported; use the original weights")


def _llama_like(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    config = model.config
    rotary = Rotary(model.model.rotary_emb.inv_freq.detach().float().cpu().clone())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (LayerSpec(config.num_key_value_heads, head_dim, rotary),) * config.num_hidden_layers


def _gpt2(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    config = model.config
    return (LayerSpec(config.n_head, config.n_embd // config.n_head, rotary=None),) * config.n_layer


_FAMILIES: dict[str, Callable[[PreTrainedModel], tuple[LayerSpec, ...]]] = {
    "gpt2": _gpt2,
    "llama": _llama_like,
    "mistral": _llama_like,
    "qwen2": _llama_like,
    "qwen3": _llama_like,
}


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
