"""The seam between stock transformers models and inlay's attention.

A model whose ``_attn_implementation`` is ours calls ``attend`` in every layer. The name is in no table of masks, so
transformers builds none; the pass's context travels through the model as a keyword argument, ``inlay``. Where a model
loses it on the way, ``carry`` takes it from the model's call to its layers. What a family puts in the place of modules
that do not call the interface (``Family.patch``) calls the same function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from inlay.attention.backend import AttentionOptions, Backend
from inlay.attention.mass import AttentionMass
from inlay.attention.plan import Part, Plan
from inlay.attention.storage import KVStorage
from inlay.models.spec import LayerSpec, ModelSpec

IMPLEMENTATION = "inlay"


@dataclass(frozen=True, slots=True)
class PassContext:
    """What the attention of one forward pass needs besides the layer's own tensors.

    watched: of rows from a number on, which are one part of the plan, who wants to know what they attend to.
    last_layer: the one whose keys end the pass, as nobody wants more of it; None for all layers.
    await_layer: called before a layer attends, where what it reads may still be on its way into the pool; None where
        all of it is there.
    """

    backend: Backend
    pool: KVStorage
    plan: Plan
    spec: ModelSpec
    watched: Sequence[tuple[int, Part, AttentionMass]] = ()
    last_layer: int | None = None
    await_layer: Callable[[int], None] | None = None

    @property
    def plain(self) -> bool:
        """True if the pass wants the output of every layer's attention and nothing else."""
        return self.last_layer is None and not self.watched

    def wait_for(self, layer: int) -> None:
        """Wait until the pool holds what a layer reads. Call it before anything reads the layer's keys and values."""
        if self.await_layer is not None:
            self.await_layer(layer)


class EndOfPassError(Exception):
    """Ends a pass in its ``last_layer``, on its way out through the model's code."""


class Absorbing:
    """Attention that stores its keys and values in another form than its own code computes with."""

    def enter_attention(self, query: Tensor) -> Tensor:
        """Queries, (1, heads, rows, width), as the stored keys take them."""
        raise NotImplementedError

    def leave_attention(self, output: Tensor) -> Tensor:
        """Sums of stored values, (1, rows, heads, width), as sums of the code's own."""
        raise NotImplementedError


_carried: ContextVar[PassContext | None] = ContextVar("inlay_pass", default=None)


def carry(model: PreTrainedModel) -> None:
    """Let ``carried_pass`` and ``attend`` find the pass of a model that does not hand keyword arguments on."""
    model.register_forward_pre_hook(_take_up, with_kwargs=True)
    model.register_forward_hook(_lay_down, always_call=True)


def carried_pass() -> PassContext | None:
    """The pass that runs in this thread through a model that carries it; None where stock code was called."""
    return _carried.get()


def _take_up(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    _carried.set(kwargs.get("inlay"))


def _lay_down(_: nn.Module, __: Any, ___: Any) -> None:
    _carried.set(None)


def attend(
    module: nn.Module,
    query: Tensor,  # (1, heads, rows, head_dim)
    key: Tensor,  # (1, kv_heads, rows, head_dim)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    inlay: PassContext | None = None,
    **said: Any,
) -> tuple[Tensor, None]:
    """Store one layer's new keys and values, and attend to what the pass's plan says.

    module: the layer's attention, with its ``layer_idx``.
    inlay: the pass, or None where it is carried. said: see ``options_of``.
    Returns (1, rows, heads, head_dim), and None for the weights that other implementations may return.
    """
    inlay = inlay or carried_pass()
    assert inlay is not None, "the pass got lost between the model's call and its layers"
    assert attention_mask is None, "transformers built a mask for an implementation that takes none"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    options = options_of(inlay.spec.layers[layer], query.shape[-1], **said)
    if isinstance(module, Absorbing):
        query = module.enter_attention(query)
    if layer == inlay.last_layer:
        inlay.pool.write(layer, inlay.plan.slots, key[0], value[0])
        raise EndOfPassError
    inlay.wait_for(layer)
    output = inlay.backend.attend(query[0], key[0], value[0], inlay.pool, inlay.plan, layer, options).unsqueeze(0)
    for first, part, mass in inlay.watched:
        rows = query[0, :, first : first + part.rows]
        mass.add(part, inlay.backend.attention_mass(rows, inlay.pool, part, layer, options).cpu().numpy())
    return (module.leave_attention(output) if isinstance(module, Absorbing) else output), None


def options_of(
    spec: LayerSpec,
    head_dim: int,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    **_: Any,
) -> AttentionOptions:
    """How a layer attends. The keywords are those of transformers' implementations, and ``AttentionOptions.slopes``."""
    return AttentionOptions(
        scale=head_dim**-0.5 if scaling is None else scaling,
        window=spec.window if sliding_window is None else sliding_window,
        softcap=softcap,
        sinks=s_aux,
        slopes=slopes,
        rotary=spec.rotary,
    )


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
