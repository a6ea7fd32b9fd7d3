"""MPT, with ALiBi. Stock code has its own attention, ignores positions and builds masks, so both are replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, build_mpt_alibi_tensor

from inlay.errors import ModelError
from inlay.models.interface import attend, carried_pass, carry
from inlay.models.spec import ModelSpec
from inlay.models.standard import Standard


class InlayMptAttention(MptAttention):
    """MptAttention through inlay. It behaves like the stock module if no pass is carried."""

    inlay_slopes: Tensor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See MptAttention.forward. Positions come from the pass."""
        inlay = carried_pass()
        if inlay is None:
            return super().forward(hidden_states, *args, **kwargs)
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = qkv.view(1, qkv.shape[1], 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        output, _ = attend(
            self, heads[0], heads[1], heads[2], None, inlay=inlay, scaling=self.softmax_scale, slopes=self.inlay_slopes
        )
        return self.out_proj(output.flatten(2)), None


class InlayMptModel(MptModel):
    """MptModel without its mask and its tensor of biases. It behaves like the stock module if no pass is carried."""

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See MptModel.forward."""
        if carried_pass() is None:
            return super().forward(input_ids, *args, **kwargs)
        hidden = self.wte(input_ids)
        for block in self.blocks:
            hidden, _ = block(hidden, position_bias=None, attention_mask=None)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.norm_f(hidden))


class Mpt(Standard):
    """MPT. Every head has its own keys, values and slope."""

    model_types = ("mpt",)
    positions = "alibi"
    multi_head = True

    def check(self, config: PretrainedConfig) -> None:
        """See Family.check. Stock code always uses ALiBi and ignores most of ``attn_config``."""
        if not config.attn_config.alibi:
            raise ModelError(
                "MPT without ALiBi is not supported, because transformers computes it with ALiBi; give an MPT with "
                "attn_config.alibi",
                code="model.unsupported_setting",
            )
        super().check(config)

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """See Family.spec."""
        return ModelSpec("mpt", self.layers(model), model.config.max_seq_len, model.config.vocab_size)

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        slopes = -build_mpt_alibi_tensor(model.config.n_heads, 2, device=torch.device("cpu"))[:, 0, 0]
        for module in model.modules():
            if type(module) is MptAttention:
                module.__class__ = InlayMptAttention
                module.inlay_slopes = slopes
            elif type(module) is MptModel:
                module.__class__ = InlayMptModel


SERVED = (Mpt(),)
