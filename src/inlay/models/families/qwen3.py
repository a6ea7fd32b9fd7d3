"""Qwen3: as Qwen2, with a norm over each head of query and key before the rotation, in place of biases."""

from __future__ import annotations

from typing import Any

from torch import nn

from inlay.models.families.llama import Llama
from inlay.models.fused import FusedAttention
from inlay.models.linear import MakeLinear


class Qwen3(Llama):
    """Each layer's attention has its window, or None, and the two norms."""

    model_types = ("qwen3",)

    def fuse_attention(self, stock: Any, make: MakeLinear) -> nn.Module:
        """The stock module passes on its own window."""
        norms = (stock.q_norm, stock.k_norm)
        return FusedAttention(stock, make, head_norms=norms, sliding_window=stock.sliding_window)


FAMILY = Qwen3()
