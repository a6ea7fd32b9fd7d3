"""Qwen3: like Qwen2, with a norm over each head of query and key before the rotation, instead of biases."""

from __future__ import annotations

from typing import Any

from torch import nn

from inlay.models.families.llama import Llama
from inlay.models.fused import FusedAttention
from inlay.models.linear import MakeLinear


class Qwen3(Llama):
    """Qwen3. The attention of each layer has its own window, or None, and the two norms."""

    model_types = ("qwen3",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """Pass on the norms and the window of the stock module."""
        norms = (stock.q_norm, stock.k_norm)
        return FusedAttention(stock, make, head_norms=norms, sliding_window=stock.sliding_window)


FAMILY = Qwen3()
