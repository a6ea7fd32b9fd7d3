"""Kimi Linear: delta attention with a decay for each channel, and layers with multi-head latent attention."""

from __future__ import annotations

from transformers import PreTrainedModel

from inlay.attention.rope import UNTURNED
from inlay.models.families.deepseek_v3 import DeepseekV3, absorb
from inlay.models.families.recurrent import Recurrent
from inlay.models.spec import LayerSpec


class KimiLinear(Recurrent):
    """Latents are stored as DeepSeek's are."""

    model_types = ("kimi_linear",)
    latent = True
    unpacked = DeepseekV3.unpacked

    def layer(self, model: PreTrainedModel) -> LayerSpec:
        """See Recurrent.layer. There is one head, and its values are its keys."""
        config = model.config
        return LayerSpec(1, config.qk_rope_head_dim + config.kv_lora_rank, UNTURNED, shared=True)

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        super().patch(model)
        absorb(model)


FAMILY = KimiLinear()
