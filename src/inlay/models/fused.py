"""A decoder's layers with their products joined and packed, and the steps between them in one call each.

The stock model stays what it is: only modules inside it are replaced, so that transformers' own code still calls them,
with any attention implementation and any cache. Weights are taken out of the stock modules part by part, so a model is
never in memory twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation, SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inlay.models import ops
from inlay.models.linear import MakeLinear, joined, of_conv1d

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def parts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The pieces that weights are loaded and packed in, by path, in the order of ``model.parameters()``."""
    for name, child in model.named_children():
        if name != model.base_model_prefix:
            yield name, child
            continue
        for inner, module in child.named_children():
            if isinstance(module, nn.ModuleList):
                yield from ((f"{name}.{inner}.{i}", layer) for i, layer in enumerate(module))
            else:
                yield f"{name}.{inner}", module


def fused(part: nn.Module, make: MakeLinear) -> nn.Module:
    """What stands in the place of a part of a model: the part itself, changed inside, or another module."""
    if isinstance(part, nn.Linear):  # lm_head; where it is tied, the embedding keeps the weight
        return joined([part], make, shared=True)
    family, kind = _kind_of(part)
    if kind == "RMSNorm":
        return FusedNorm(part)
    if kind == "RotaryEmbedding":
        return FusedRotary(part)
    if kind == "DecoderLayer":
        _fuse_layer(part, family, make)
    elif type(part).__name__ == "GPT2Block":
        _pack_block(part, make)
    return part


def _kind_of(module: nn.Module) -> tuple[str, str]:
    name = type(module).__name__
    for family in _FAMILIES:
        if name.startswith(family):
            return family, name.removeprefix(family)
    return "", ""


def _fuse_layer(layer: Any, family: str, make: MakeLinear) -> None:
    layer.input_layernorm = FusedNorm(layer.input_layernorm)
    layer.post_attention_layernorm = FusedNorm(layer.post_attention_layernorm)
    layer.self_attn = FusedAttention(layer.self_attn, family, make)
    layer.mlp = FusedMLP(layer.mlp, make)


def _pack_block(block: Any, make: MakeLinear) -> None:
    """GPT-2 joins query, key and value itself."""
    block.attn.c_attn = of_conv1d(block.attn.c_attn, make)
    block.attn.c_proj = of_conv1d(block.attn.c_proj, make)
    block.mlp.c_fc = of_conv1d(block.mlp.c_fc, make)
    block.mlp.c_proj = of_conv1d(block.mlp.c_proj, make)
    if isinstance(block.mlp.act, NewGELUActivation):
        block.mlp.act = nn.GELU("tanh")  # the same function in one call


class FusedNorm(nn.Module):
    """RMSNorm of Llama, Mistral and Qwen in one step."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width)."""
        return ops.rms_norm(x, self.weight, self.eps)


class FusedRotary(nn.Module):
    """The stock rotary table, kept in fp32: a bfloat16 model's own would round angles to 8 bits."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.stock = rotary
        self._fp32 = torch.empty(0)

    @property
    def inv_freq(self) -> Tensor:
        return self.stock.inv_freq  # type: ignore[return-value]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: (batch, rows). Returns cosines and sines, (batch, rows, head_dim) each, fp32."""
        cos, sin = self.stock(self._fp32, position_ids)
        return cos, sin


class FusedMLP(nn.Module):
    """down(act(gate(x)) · up(x)) with gate and up in one product."""

    def __init__(self, mlp: Any, make: MakeLinear) -> None:
        super().__init__()
        self.act = None if isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation)) else mlp.act_fn
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj], make)
        self.down = joined([mlp.down_proj], make)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width)."""
        gate_up = self.gate_up(x)
        if self.act is None:
            return self.down(ops.silu_mul(gate_up))
        gate, up = gate_up.chunk(2, -1)
        return self.down(self.act(gate) * up)


class FusedAttention(nn.Module):
    """Self-attention with query, key and value in one product, turned where they lie.

    Attention itself is whatever the model's configuration names, as in the stock module; ``layer_idx``, ``is_causal``
    and ``num_key_value_groups`` are there for those implementations.
    """

    def __init__(self, attention: Any, family: str, make: MakeLinear) -> None:
        super().__init__()
        self.config = attention.config
        self.layer_idx = attention.layer_idx
        self.is_causal = attention.is_causal
        self.num_key_value_groups = attention.num_key_value_groups
        self.head_dim = attention.head_dim
        self.scaling = attention.scaling
        self.heads = self.config.num_attention_heads
        self.kv_heads = self.config.num_key_value_heads
        self.options = _window_options(attention, family)
        self.query_norm = FusedNorm(attention.q_norm) if family == "Qwen3" else None
        self.key_norm = FusedNorm(attention.k_norm) if family == "Qwen3" else None
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], make)
        self.out = joined([attention.o_proj], make)
        self._eager: Callable[..., Any] = sys.modules[type(attention).__module__].eager_attention_forward

    def forward(
        self,
        hidden_states: Tensor,  # (batch, rows, width)
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The stock module's call. Returns (batch, rows, width) and what the implementation says of its weights."""
        batch, rows, _ = hidden_states.shape
        qkv = self.qkv(hidden_states).view(batch * rows, -1, self.head_dim)
        self._turn(qkv, *position_embeddings)
        heads = qkv.view(batch, rows, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **self.options, **kwargs
        )
        return self.out(output.reshape(batch, rows, -1)), weights

    def _turn(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Norm, where the model has one, and rotate queries and keys in place."""
        query, key = qkv[:, : self.heads], qkv[:, self.heads : self.heads + self.kv_heads]
        if self.query_norm is not None and self.key_norm is not None:
            ops.norm_heads_(query, self.query_norm.weight, self.query_norm.eps)
            ops.norm_heads_(key, self.key_norm.weight, self.key_norm.eps)
        rows = (qkv.shape[0], self.head_dim)
        if cos.shape[0] * cos.shape[1] != rows[0]:  # one row of positions for a whole batch
            batch = rows[0] // cos.shape[1]
            cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        ops.rotate_(qkv[:, : self.heads + self.kv_heads], cos.reshape(rows), sin.reshape(rows))


def _window_options(attention: Any, family: str) -> dict[str, int | None]:
    """The sliding window as the stock module of each family passes it on."""
    if family == "Llama":
        return {}
    source = attention.config if family == "Mistral" else attention
    return {"sliding_window": getattr(source, "sliding_window", None)}
