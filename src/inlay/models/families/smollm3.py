"""SmolLM3: Llama with some layers without positions. A shift of those is free."""

from __future__ import annotations

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class SmolLM3(Standard):
    """SmolLM3. The configuration has a 1 for every layer that rotates."""

    model_types = ("smollm3",)

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.no_rope_layers[layer])


FAMILY = SmolLM3()
