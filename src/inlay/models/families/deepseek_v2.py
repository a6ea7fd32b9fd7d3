"""DeepSeek-V2: latent attention as in V3, with the pairs that are rotated side by side."""

from __future__ import annotations

from inlay.models.families.deepseek_v3 import DeepseekV3


class DeepseekV2(DeepseekV3):
    """Only the layout of the rotary part differs."""

    model_types = ("deepseek_v2",)
    interleaved = True


FAMILY = DeepseekV2()
