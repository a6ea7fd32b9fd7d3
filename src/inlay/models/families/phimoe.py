"""Phi-3.5-MoE: its stock code tells its sliding window to the mask alone, which is not built here."""

from __future__ import annotations

from transformers import PretrainedConfig

from inlay.models.standard import Standard


class PhiMoe(Standard):
    """One window for all layers, or none."""

    model_types = ("phimoe",)

    def masked_window(self, config: PretrainedConfig) -> int | None:
        """See Standard.masked_window."""
        return config.sliding_window


FAMILY = PhiMoe()
