"""DeepSeek-V2: latent attention as in V3. The two elements of a rotated pair are adjacent."""

from __future__ import annotations

from inlay.models.families.deepseek_v3 import DeepseekV3


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2. Only the layout of the rotary part differs from V3."""

    model_types = ("deepseek_v2",)
    interleaved = True


FAMILY = DeepseekV2()
