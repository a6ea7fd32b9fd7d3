"""What the rest of inlay needs to know of a loaded model: its layers' keys and values, and their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inlay.attention.rope import Rotary
from inlay.attention.storage import LayerShape


@dataclass(frozen=True)
class LayerSpec:
    """The keys and values of one layer, and their positions. What else its attention needs, the layer says itself.

    rotary: how a shift turns a query: ``UNTURNED`` where only the distance counts (ALiBi) or positions do not enter at
        all; None where positions are in the keys in a way that no turn can undo (learned positions).
    shared: whether its values are its keys (latent attention).
    window: a sliding window that the layer does not name when it attends; None for none, and where it does.
    """

    kv_heads: int
    head_dim: int
    rotary: Rotary | None
    shared: bool = False
    window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of inlay needs to know of a model.

    family: the ``model_type`` of its configuration.
    fixed: why no key can be read at a shift although the layers' positions would allow it; None where it can.
    unshared: why nothing of it is reused at all, so that it runs with caches of its own; None where it is.
    """

    family: str
    layers: tuple[LayerSpec, ...]
    max_positions: int
    vocab_size: int
    fixed: str | None = None
    unshared: str | None = None

    @property
    def shapes(self) -> list[LayerShape]:
        """What a pool holds of each layer."""
        return [LayerShape(layer.kv_heads, layer.head_dim, layer.shared) for layer in self.layers]

    @property
    def why_fixed(self) -> str | None:
        """The reason why keys cannot be read at a shift, as far as it is known before the probe."""
        if self.fixed is None and any(layer.rotary is None for layer in self.layers):
            return f"{self.family} has learned positions, which no turn of the query can move"
        return self.fixed


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
