"""Qwen2: Llama with biases on query, key and value, and a sliding window in some layers if configured."""

from __future__ import annotations

from typing import Any

from torch import nn

from inlay.models.families.llama import Llama
from inlay.models.fused import FusedAttention
from inlay.models.linear import MakeLinear


class Qwen2(Llama):
    """Qwen2. The attention of each layer has its own window, or None."""

    model_types = ("qwen2",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """Pass on the window of the stock module."""
        return FusedAttention(stock, make, sliding_window=stock.sliding_window)


FAMILY = Qwen2()
