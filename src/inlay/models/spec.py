"""The layers of a loaded model, as the rest of inlay needs them: their keys and values, and their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inlay.attention.rope import Rotary
from inlay.attention.storage import LayerShape


@dataclass(frozen=True)
class LayerSpec:
    """The keys and values of one layer, and their positions. Other attention options come from the layer's own calls.

    Args:
        kv_heads: Heads of keys and values.
        head_dim: Elements of a head.
        rotary: How a shift rotates a query. ``UNTURNED`` if only the distance counts (ALiBi) or there are no positions.
            None if the keys contain positions that no rotation can undo (learned positions).
        shared: True if the values are the keys (latent attention).
        window: A sliding window that the layer does not pass to the attention function. None: it passes it, or has
            none.
    """

    kv_heads: int
    head_dim: int
    rotary: Rotary | None
    shared: bool = False
    window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """The properties of a model that the rest of inlay needs.

    Args:
        family: The ``model_type`` of its configuration.
        layers: The layers with keys and values of their own, in the order of ``layer_idx``.
        max_positions, vocab_size: Limits of positions and token ids.
        fixed: The reason against shifts, if the positions alone would allow them. None: no such reason.
        unshared: The reason against any reuse. Such a model runs with its own caches. None: states are reused.
        sources: By ``layer_idx``, the entry of ``layers`` that the layer reads. Empty: each layer reads its own.
        keeps_rows: True if the layers behind the last one with keys of its own take the rows of ``PassContext.kept``.
        limit: The reason why the context is shorter than the configuration says. None: it is not.
        recurrent: True for a model with recurrent layers. It has states beside its KV.
        first_tokens: The tokens of a module whose convolutions see other text, which are recomputed by default.
        whole: The reason against modules, for a model that reuses exact prefixes alone. None: it reads modules.
        attending: The ``layer_idx`` of each of ``layers``, if only some layers attend. None: all attend.
    """

    family: str
    layers: tuple[LayerSpec, ...]
    max_positions: int
    vocab_size: int
    fixed: str | None = None
    unshared: str | None = None
    sources: tuple[int, ...] = ()
    keeps_rows: bool = False
    limit: str | None = None
    recurrent: bool = False
    first_tokens: int = 0
    whole: str | None = None
    attending: tuple[int, ...] | None = None

    def source(self, layer_idx: int) -> int:
        """Return the entry of ``layers``, and so the layer of the pool, that a layer of the model reads."""
        if self.attending is not None:
            return self.attending.index(layer_idx)
        return self.sources[layer_idx] if self.sources else layer_idx

    def reads_another(self, layer_idx: int) -> bool:
        """True if a layer reads the keys and values of an earlier layer."""
        return bool(self.sources) and self.sources.index(self.sources[layer_idx]) < layer_idx

    @property
    def readers(self) -> int:
        """The number of layers that read the keys and values of an earlier one."""
        return len(self.sources) - len(set(self.sources))

    @property
    def shapes(self) -> list[LayerShape]:
        """The pool shape of each layer."""
        return [LayerShape(layer.kv_heads, layer.head_dim, layer.shared) for layer in self.layers]

    @property
    def why_fixed(self) -> str | None:
        """The reason why keys cannot be read at a shift, as far as it is known before the probe. None: no reason."""
        if self.fixed is None and any(layer.rotary is None for layer in self.layers):
            return f"{self.family} has learned positions, so a segment is read only where it was encoded"
        return self.fixed


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as 'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
