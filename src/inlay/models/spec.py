"""What the rest of inlay needs to know of a loaded model: its layers' keys and values, and their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inlay.attention.rope import Rotary
from inlay.attention.storage import LayerShape


@dataclass(frozen=True)
class LayerSpec:
    """The keys and values of one layer, and their positions. What else its attention needs, the layer says itself.

    rotary: None where positions are not rotary.
    """

    kv_heads: int
    head_dim: int
    rotary: Rotary | None


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of inlay needs to know of a model.

    family: the ``model_type`` of its configuration.
    """

    family: str
    layers: tuple[LayerSpec, ...]
    max_positions: int
    vocab_size: int

    @property
    def shapes(self) -> list[LayerShape]:
        """What a pool holds of each layer."""
        return [LayerShape(layer.kv_heads, layer.head_dim) for layer in self.layers]

    @property
    def rotary(self) -> bool:
        """Whether every layer's positions are rotary, so that a shift can be a turn of the query."""
        return all(layer.rotary is not None for layer in self.layers)


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
