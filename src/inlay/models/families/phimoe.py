"""Phi-3.5-MoE: stock code gives its sliding window only to the mask, which is not built here."""

from __future__ import annotations

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class PhiMoe(Standard):
    """Phi-3.5-MoE. All layers have the same window, or none."""

    model_types = ("phimoe",)

    def masked_window(self, config: PretrainedConfig) -> int | None:
        """See Standard.masked_window."""
        return config.sliding_window


FAMILY = PhiMoe()
