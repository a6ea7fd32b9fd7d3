"""Cohere2 and what is built like it: layers with a sliding window rotate, the others have no positions at all."""

from __future__ import annotations

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class Cohere2(Standard):
    """Pairs that are rotated lie side by side."""

    model_types = ("cohere2", "cohere2_moe")
    interleaved = True

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.layer_types[layer] == "sliding_attention")


FAMILY = Cohere2()
