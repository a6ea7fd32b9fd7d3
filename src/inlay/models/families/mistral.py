"""Mistral: Llama with a sliding window over every layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from inlay.models.families.llama import Llama
from inlay.models.fused import FusedAttention
from inlay.models.linear import MakeLinear


class Mistral(Llama):
    """Mistral. The configuration has one window for all layers, or None."""

    model_types = ("mistral",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """Pass on the window of the configuration, like the stock module."""
        return FusedAttention(stock, make, sliding_window=getattr(stock.config, "sliding_window", None))


FAMILY = Mistral()
