"""GPT-BigCode (StarCoder): learned positions, and one head of keys and values for all queries, or one for each."""

from __future__ import annotations

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class GptBigCode(Standard):
    """GPT-BigCode. The configuration sets the number of KV heads."""

    model_types = ("gpt_bigcode",)
    positions = "learned"

    def kv_heads(self, config: PretrainedConfig) -> int:
        """See Standard.kv_heads."""
        return 1 if config.multi_query else int(config.num_attention_heads)


FAMILY = GptBigCode()
