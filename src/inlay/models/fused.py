"""Modules of a decoder with joined and packed products, and with one call for each step between them.

A family replaces modules inside the stock model by these. transformers' own code still calls them, with any attention
implementation and any cache. Each module takes the weights out of the stock module.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inlay.attention.backend import AttentionOptions
from inlay.models import ops
from inlay.models.interface import PassContext, options_of
from inlay.models.linear import MakeLinear, joined
from inlay.models.spec import ModelSpec


class FusedNorm(nn.Module):
    """RMSNorm in one call."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width)."""
        return ops.rms_norm(x, self.weight, self.eps)


class FusedRotary(nn.Module):
    """The stock rotary table in fp32. In bfloat16 it would round angles to 8 bits."""

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


class LastLayer:
    """The ``forward`` of a decoder's last layer: a pass with kept rows computes only keys and values of the others.

    The other rows are zero in the output, and nothing reads them.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)
        self.replaced: Callable[..., Any] | None = vars(layer).get("forward")  # None: the class has it

    @staticmethod
    def serve(layer: Any) -> None:
        """Install this forward on a layer with fused modules."""
        layer.forward = LastLayer(layer)

    @staticmethod
    def serves(model: nn.Module) -> bool:
        """True if the last layer of a model has this forward."""
        return any(isinstance(vars(module).get("forward"), LastLayer) for module in model.modules())

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer like its other forward. ``hidden_states`` is (1, rows, width)."""
        layer: Any = self._layer()
        context: PassContext | None = kwargs.get("inlay")
        if args or context is None or context.kept is None:
            forward = self.replaced or MethodType(type(layer).forward, layer)
            return forward(hidden_states, *args, **kwargs)
        rows = context.kept.rows
        attended, _ = layer.self_attn(layer.input_layernorm(hidden_states), **kwargs)  # of the kept rows
        x = hidden_states[:, rows] + attended
        output = torch.zeros_like(hidden_states)
        output[:, rows] = x + layer.mlp(layer.post_attention_layernorm(x))
        return output


class FusedAttention(nn.Module):
    """Self-attention with query, key and value in one product, rotated in place.

    Attention itself is the implementation that the model's configuration names, as in the stock module. The
    implementations need ``layer_idx``, ``is_causal`` and ``num_key_value_groups``.

    Args:
        head_norms: The norms of query and key over each head, before the rotation. None: no norms.
        options: Other options that the stock module passes to the implementation, such as ``sliding_window``.
    """

    def __init__(
        self, attention: Any, make: MakeLinear, *, head_norms: tuple[Any, Any] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.config = attention.config
        self.layer_idx = attention.layer_idx
        self.is_causal = attention.is_causal
        self.num_key_value_groups = attention.num_key_value_groups
        self.head_dim = attention.head_dim
        self.scaling = attention.scaling
        self.heads = self.config.num_attention_heads
        self.kv_heads = self.config.num_key_value_heads
        self.options = options
        self.query_norm = FusedNorm(head_norms[0]) if head_norms else None
        self.key_norm = FusedNorm(head_norms[1]) if head_norms else None
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], make)
        self.out = joined([attention.o_proj], make)
        self._eager: Callable[..., Any] = sys.modules[type(attention).__module__].eager_attention_forward

    def forward(
        self,
        hidden_states: Tensor,  # (batch, rows, width)
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run like the stock module. Returns (batch, rows, width) and the attention weights, if there are any."""
        batch, rows, _ = hidden_states.shape
        qkv = self.qkv(hidden_states).view(batch * rows, -1, self.head_dim)
        self._turn(qkv, *position_embeddings)
        output, weights = self.attend(qkv.view(batch, rows, -1, self.head_dim), attention_mask, **kwargs)
        return self.out(output.flatten(2)), weights

    def attend(
        self,
        qkv: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cache: Any = None,
        past_key_values: Any = None,  # the name of the cache before transformers 5.24
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run attention alone.

        Args:
            qkv: (batch, rows, heads + 2 · kv_heads, head_dim), rotated; heads of queries, then keys, then values.

        Returns:
            (batch, rows, heads, head_dim), and the implementation's attention weights, if any.
        """
        query, key, value = qkv.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), 1)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        output: tuple[Tensor, Tensor | None] = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **self.options, **kwargs
        )
        return output

    def attention_options(self, spec: ModelSpec) -> AttentionOptions:
        """Return the options for attention through inlay."""
        return options_of(spec.layers[self.layer_idx], self.head_dim, scaling=self.scaling, **self.options)

    def _turn(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply the head norms, if any, and rotate queries and keys in place."""
        query, key = qkv[:, : self.heads], qkv[:, self.heads : self.heads + self.kv_heads]
        if self.query_norm is not None and self.key_norm is not None:
            ops.norm_heads_(query, self.query_norm.weight, self.query_norm.eps)
            ops.norm_heads_(key, self.key_norm.weight, self.key_norm.eps)
        rows = (qkv.shape[0], self.head_dim)
        if cos.shape[0] * cos.shape[1] != rows[0]:  # one row of positions for a whole batch
            batch = rows[0] // cos.shape[1]
            cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        ops.rotate_(qkv[:, : self.heads + self.kv_heads], cos.reshape(rows), sin.reshape(rows))
