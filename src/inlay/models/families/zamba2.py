"""Zamba2: Mamba-2 layers, some of them with one of a few shared blocks of attention."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from inlay.models.families.recurrent import Recurrent


class SharedAttention(nn.Module):
    """Base of attention that serves several layers. A call names its layer, which has KV of its own."""

    layer_idx: int

    def forward(self, hidden_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.layer_idx = layer_idx
        return super().forward(hidden_states, layer_idx, *args, **kwargs)


class Zamba2(Recurrent):
    """The shared blocks know their layer only when they are called."""

    model_types = ("zamba2",)

    def attending(self, model: PreTrainedModel) -> tuple[int, ...]:
        """See Recurrent.attending."""
        return tuple(layer for layer, kind in enumerate(model.config.layer_types) if kind == "hybrid")

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        super().patch(model)
        for module in model.modules():
            if hasattr(module, "layer_block_map") and not isinstance(module, SharedAttention):
                stock = type(module)
                module.__class__ = type(f"Inlay{stock.__name__}", (SharedAttention, stock), {})


FAMILY = Zamba2()
