"""Granite 4 without recurrent layers, such as granite-4.0-micro. It is published under the type of the hybrids."""

from __future__ import annotations

from typing import ClassVar

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class Granite4(Standard):
    """Granite 4 if all layers attend, with rotary positions or none."""

    model_types = ("granitemoehybrid",)
    typical: ClassVar[dict[str, object]] = {"layer_types": ["attention"] * 32, "position_embedding_type": "rope"}

    def serves(self, config: PretrainedConfig) -> bool:
        """See Family.serves."""
        return bool(config.layer_types) and set(config.layer_types) <= {"attention", "full_attention"}

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.position_embedding_type == "rope")


FAMILY = Granite4()
