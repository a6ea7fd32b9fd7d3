"""Falcon, with rotary positions or ALiBi. Stock code has its own attention, so its ``forward`` is replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from inlay.attention.rope import UNTURNED, Rotary
from inlay.models.interface import attend, carried_pass, carry
from inlay.models.spec import LayerSpec
from inlay.models.standard import Standard


class InlayFalconAttention(FalconAttention):
    """FalconAttention through inlay. It behaves like the stock module if no pass is carried."""

    inlay_slopes: Tensor | None

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """See FalconAttention.forward."""
        inlay = carried_pass()
        if inlay is None:
            kwargs["position_embeddings"] = position_embeddings
            return super().forward(hidden_states, alibi, attention_mask, *args, **kwargs)
        query, key, value = self._heads(self.query_key_value(hidden_states))
        if self.inlay_slopes is None:
            assert position_embeddings is not None
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        output, _ = attend(
            self, query, key, value, None, inlay=inlay, scaling=self.inv_norm_factor, slopes=self.inlay_slopes
        )
        return self.dense(output.flatten(2)), None

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, (1, heads, rows, head_dim), without stock code's copies of heads."""
        rows = qkv.shape[1]
        if not self.new_decoder_architecture:
            query, key, value = self._split_heads(qkv)
        else:
            groups = qkv.view(1, rows, self.num_kv_heads or 1, -1, self.head_dim)
            query, key, value = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


class Falcon(Standard):
    """Falcon. All layers have the same kind of positions."""

    model_types = ("falcon",)

    def layer_positions(self, config: PretrainedConfig) -> tuple[str, ...]:
        """See Family.layer_positions."""
        return ("alibi" if config.alibi else "rotary",) * config.num_hidden_layers

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers. Heads are counted as computed, before stock code repeats them."""
        config = model.config
        heads = config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
        base: Any = model.base_model
        rotary = UNTURNED if config.alibi else Rotary(base.rotary_emb.inv_freq.detach().float().cpu().clone())
        return (LayerSpec(heads, config.hidden_size // config.num_attention_heads, rotary),) * config.num_hidden_layers

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        config = model.config
        slopes: Tensor | None = None
        if config.alibi:  # stock code rounds slopes to bfloat16 and scales the bias like the scores
            width = config.hidden_size // config.num_attention_heads
            slopes = _get_alibi_slopes(config.num_attention_heads, torch.device("cpu"))
            slopes = slopes.bfloat16().float() * width**-0.5
        for module in model.modules():
            if type(module) is FalconAttention:
                module.__class__ = InlayFalconAttention
                module.register_buffer("inlay_slopes", slopes, persistent=False)


SERVED = (Falcon(),)
