"""Granite 4. Models without recurrent layers, such as granite-4.0-micro, have the type of the hybrids."""

from __future__ import annotations

from typing import ClassVar

from transformers import PretrainedConfig

from inlay.models.families.recurrent import Recurrent
from inlay.models.standard import Standard


class Granite4Hybrid(Recurrent):
    """Granite 4 with recurrent layers."""

    model_types = ("granitemoehybrid",)


class Granite4(Standard):
    """Granite 4 if all layers attend, with rotary positions or none."""

    model_types = ("granitemoehybrid",)
    otherwise = Granite4Hybrid()
    typical: ClassVar[dict[str, object]] = {"layer_types": ["attention"] * 32, "position_embedding_type": "rope"}

    def serves(self, config: PretrainedConfig) -> bool:
        """See Family.serves."""
        return set(config.layer_types) <= {"attention", "full_attention"}

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.position_embedding_type == "rope")


FAMILY = Granite4()
