"""BLOOM, with ALiBi. Stock code has its own attention and ignores positions, so its ``forward`` is replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, _get_alibi_slopes

from inlay.errors import ModelError
from inlay.models.interface import attend, carried_pass, carry
from inlay.models.spec import ModelSpec
from inlay.models.standard import Standard

#: BLOOM's configuration has no longest position, because ALiBi has none. It was trained on 2,048.
_MAX_POSITIONS = 2048


class InlayBloomAttention(BloomAttention):
    """BloomAttention through inlay. Outside a pass of the engine it behaves like the stock module."""

    inlay_slopes: Tensor

    def forward(self, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See BloomAttention.forward. Positions come from the pass."""
        inlay = carried_pass()
        if inlay is None:
            return super().forward(hidden_states, residual, *args, **kwargs)
        heads = self._reshape(self.query_key_value(hidden_states))
        output, _ = attend(self, *heads, None, inlay=inlay, scaling=self.inv_norm_factor, slopes=self.inlay_slopes)
        return self.dense(output.flatten(2)) + residual, None


class Bloom(Standard):
    """BLOOM. Every head has its own keys, values and slope."""

    model_types = ("bloom",)
    positions = "alibi"
    multi_head = True

    def check(self, config: PretrainedConfig) -> None:
        """See Family.check. Rejects the sliced products that imitate the training."""
        if config.pretraining_tp > 1 and config.slow_but_exact:
            raise ModelError(
                "BLOOM with slow_but_exact is not supported; set it to false in config.json",
                code="model.unsupported_setting",
            )
        super().check(config)

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """See Family.spec."""
        longest = getattr(model.config, "seq_length", None) or _MAX_POSITIONS
        return ModelSpec("bloom", self.layers(model), longest, model.config.vocab_size)

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        slopes = _get_alibi_slopes(model.config.num_attention_heads, torch.device("cpu"))
        for module in model.modules():
            if type(module) is BloomAttention:
                module.__class__ = InlayBloomAttention
                module.inlay_slopes = slopes


SERVED = (Bloom(),)
