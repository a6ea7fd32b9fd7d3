"""Ministral: Llama with a sliding window over the layers that the configuration names."""

from __future__ import annotations

from inlay.models.families.qwen2 import Qwen2


class Ministral(Qwen2):
    """Ministral. The attention of each layer has its own window, or None."""

    model_types = ("ministral",)


FAMILY = Ministral()
