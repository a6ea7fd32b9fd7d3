"""Cohere2 and similar models: layers with a sliding window rotate, the others have no positions."""

from __future__ import annotations

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class Cohere2(Standard):
    """Cohere2. The two elements of a rotated pair are adjacent."""

    model_types = ("cohere2", "cohere2_moe")
    interleaved = True

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.layer_types[layer] == "sliding_attention")


FAMILY = Cohere2()
