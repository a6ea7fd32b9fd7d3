"""The seam between stock transformers models and inlay's attention.

A model whose ``_attn_implementation`` is ours calls ``attend`` in every layer. The name is in no table of masks, so
transformers builds none; the pass's context travels through the model as a keyword argument, ``inlay``. What a family
puts in the place of modules that do neither (``Family.patch``) calls the same function.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from inlay.attention.backend import AttentionOptions, Backend
from inlay.attention.plan import Plan
from inlay.attention.storage import KVStorage
from inlay.models.spec import ModelSpec

IMPLEMENTATION = "inlay"


@dataclass(frozen=True, slots=True)
class PassContext:
    """What the attention of one forward pass needs besides the layer's own tensors."""

    backend: Backend
    pool: KVStorage
    plan: Plan
    spec: ModelSpec


def attend(
    module: nn.Module,
    query: Tensor,  # (1, heads, rows, head_dim)
    key: Tensor,  # (1, kv_heads, rows, head_dim)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    inlay: PassContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Store one layer's new keys and values, and attend to what the pass's plan says.

    module: the layer's attention, with its ``layer_idx``.
    inlay: the pass; the other keywords are those of transformers' implementations, and ``AttentionOptions.slopes``.
    Returns (1, rows, heads, head_dim), and None for the weights that other implementations may return.
    """
    assert attention_mask is None, "transformers built a mask for an implementation that takes none"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        slopes=slopes,
        rotary=inlay.spec.layers[layer].rotary,
    )
    output = inlay.backend.attend(query[0], key[0], value[0], inlay.pool, inlay.plan, layer, options)
    return output.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attend)


_switching = threading.Lock()
_in_use: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()  # what a model comes back to, then who is inside


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a model attend through another implementation ("inlay", "sdpa", "eager") within a block.

    Blocks of several threads may overlap where they ask for the same one, as those of two engines over one model do.
    """
    config = model.config
    with _switching:
        names = _in_use.setdefault(model, [config._attn_implementation])
        names.append(name)
        config._attn_implementation = name
    try:
        yield
    finally:
        with _switching:
            names.reverse()
            names.remove(name)
            names.reverse()
            config._attn_implementation = names[-1]
            if len(names) == 1:
                del _in_use[model]
