"""Llama, and families with its module names: grouped heads, rotary positions, RMSNorm, a gated MLP."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inlay.attention.rope import Rotary
from inlay.errors import ModelError
from inlay.models.family import Family
from inlay.models.few_rows import FewRows
from inlay.models.fused import FusedAttention, FusedMLP, FusedNorm, FusedRotary, LastLayer
from inlay.models.linear import MakeLinear
from inlay.models.spec import LayerSpec


class Llama(Family):
    """Decoders with Llama's shape and names of modules."""

    model_types = ("llama",)
    joined = True

    def check(self, config: PretrainedConfig) -> None:
        """See Family.check. Stock code rotates whole heads, and fails for a scaling with partial rotation."""
        super().check(config)
        rotated = getattr(config, "rope_parameters", None) or {}
        kind, part = rotated.get("rope_type", "default"), rotated.get("partial_rotary_factor") or 1.0
        if kind != "default" and part != 1.0:
            raise ModelError(
                f"partial_rotary_factor is {part:g} beside rotary scaling '{kind}', and models of type "
                f"'{config.model_type}' turn whole heads; take it out of rope_parameters if it does not belong there",
                code="model.unsupported_setting",
            )

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers. All layers have one shape and one table of frequencies."""
        config = model.config
        rotary = Rotary(model.model.rotary_emb.inv_freq.detach().float().cpu().clone())
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (LayerSpec(config.num_key_value_heads, head_dim, rotary),) * config.num_hidden_layers

    def fuse(self, path: str, part: Any, make: MakeLinear) -> nn.Module:
        """Join query, key and value, and gate and up. Norms, rotation and activation become one call each."""
        match path.split("."):
            case [*_, "layers", index]:
                part.input_layernorm = FusedNorm(part.input_layernorm)
                part.post_attention_layernorm = FusedNorm(part.post_attention_layernorm)
                part.self_attn = self.fuse_attention(part.self_attn, make)
                part.mlp = FusedMLP(part.mlp, make)
                FewRows.serve(part)
                if int(index) == part.self_attn.config.num_hidden_layers - 1:
                    LastLayer.serve(part)
            case [*_, "norm"]:
                return FusedNorm(part)
            case [*_, "rotary_emb"]:
                return FusedRotary(part)
        return super().fuse(path, part, make)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """Return the replacement of a layer's attention."""
        return FusedAttention(stock, make)


class Qwen2(Llama):
    """Qwen2: Llama with biases on query, key and value. Each layer has its own window, or None."""

    model_types = ("qwen2",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """Return fused attention with the window of the stock module."""
        return FusedAttention(stock, make, sliding_window=stock.sliding_window)


class Qwen3(Llama):
    """Qwen3: like Qwen2, with a norm over each head of query and key before the rotation, instead of biases."""

    model_types = ("qwen3",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """Return fused attention with the head norms and the window of the stock module."""
        norms = (stock.q_norm, stock.k_norm)
        return FusedAttention(stock, make, head_norms=norms, sliding_window=stock.sliding_window)


class Mistral(Llama):
    """Mistral. The configuration has one window for all layers, or None."""

    model_types = ("mistral",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """Return fused attention with the window of the configuration, like the stock module."""
        return FusedAttention(stock, make, sliding_window=getattr(stock.config, "sliding_window", None))


class Ministral(Qwen2):
    """Ministral. Each layer has its own window, or None."""

    model_types = ("ministral",)


SERVED = (Llama(), Mistral(), Ministral(), Qwen2(), Qwen3())
