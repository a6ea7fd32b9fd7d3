"""EXAONE 4 and AFMoE: layers without a sliding window have no positions, unless no layer has a window."""

from __future__ import annotations

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class Exaone4(Standard):
    """EXAONE 4 and AFMoE. A model without any window rotates in all layers."""

    model_types = ("afmoe", "exaone4", "exaone_moe")

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return config.sliding_window is None or bool(config.layer_types[layer] == "sliding_attention")


FAMILY = Exaone4()
