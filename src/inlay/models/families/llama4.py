"""Llama 4: interleaved rotation in three of four layers, which attend within chunks of 8,192 positions."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from inlay.models.interface import carried_pass, carry
from inlay.models.standard import Standard


class InlayLlama4Attention(Llama4TextAttention):
    """Llama4TextAttention without its temperature in a pass. It behaves like the stock class if no pass is carried.

    Stock code takes the row of a query for its position, and a pass has rows of several requests. The temperature is 1
    at all positions that ``Llama4`` accepts.
    """

    @property
    def attn_temperature_tuning(self) -> bool:  # type: ignore[override]  # stock code sets it once
        return bool(self.config.attn_temperature_tuning) and carried_pass() is None


class Llama4(Standard):
    """Llama 4. The configuration has a 1 for every layer that rotates. The other layers see the whole text."""

    model_types = ("llama4_text",)
    interleaved = True

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.no_rope_layers[layer])

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        for module in model.modules():
            if type(module) is Llama4TextAttention:
                attention: Any = module
                attention.__class__ = InlayLlama4Attention


FAMILY = Llama4()
