"""Qwen2: Llama with biases on query, key and value, and a sliding window over some layers if the configuration says."""

from __future__ import annotations

from typing import Any

from torch import nn

from inlay.models.families.llama import Llama
from inlay.models.fused import FusedAttention
from inlay.models.linear import MakeLinear


class Qwen2(Llama):
    """Each layer's attention knows its window, or None."""

    model_types = ("qwen2",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """The stock module passes on its own window."""
        return FusedAttention(stock, make, sliding_window=stock.sliding_window)


FAMILY = Qwen2()
