"""Mistral: Llama with a sliding window over every layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from inlay.models.families.llama import Llama
from inlay.models.fused import FusedAttention
from inlay.models.linear import MakeLinear


class Mistral(Llama):
    """The window is one number of the configuration, or None."""

    model_types = ("mistral",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """The stock module passes on its configuration's window."""
        return FusedAttention(stock, make, sliding_window=getattr(stock.config, "sliding_window", None))


FAMILY = Mistral()
