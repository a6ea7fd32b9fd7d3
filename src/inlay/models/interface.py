"""The seam between stock transformers models and inlay's attention.

A model with our ``_attn_implementation`` calls ``attend`` in every layer. The name is in no table of masks, so
transformers builds none. The context of the pass is passed through the model as the keyword argument ``inlay``. If a
model drops it on the way, ``carry`` brings it from the model's call to its layers. Some modules do not call the
interface. A family replaces them (``Family.patch``) by modules that call ``attend``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from inlay.attention.backend import AttentionOptions, Backend
from inlay.attention.mass import AttentionMass
from inlay.attention.plan import Part, Plan
from inlay.attention.storage import KVStorage
from inlay.models.mixers.states import PassStates
from inlay.models.spec import LayerSpec, ModelSpec

IMPLEMENTATION = "inlay"


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows that a pass still computes behind the last keys that it stores. They have logits; nothing reads others.

    Args:
        rows: Their numbers in the pass, (kept,), int64, on the device.
        plan: The plan of these rows alone.
    """

    rows: Tensor
    plan: Plan


@dataclass(frozen=True, slots=True)
class PassContext:
    """The context of one forward pass, for the attention of its layers.

    Args:
        backend, pool, plan, spec: The attention backend, the KV pool, the plan of the pass, and the model.
        watched: (first row, part of the plan, result) for each part with attention masses to measure.
        last_layer: The layer of the pool whose keys end the pass, because no later result is needed. None: all layers
            run.
        await_layer: Called before a layer attends, if keys may still be loading into the pool. None: all are resident.
        kept: The rows of the last layer, or of all layers that read the keys of earlier ones. None: all rows.
        states: The states of recurrent layers. None: the model has no such layers.
    """

    backend: Backend
    pool: KVStorage
    plan: Plan
    spec: ModelSpec
    watched: Sequence[tuple[int, Part, AttentionMass]] = ()
    last_layer: int | None = None
    await_layer: Callable[[int], None] | None = None
    kept: KeptRows | None = None
    states: PassStates | None = None

    @property
    def plain(self) -> bool:
        """True if the pass wants the output of every layer's attention and nothing else."""
        return self.last_layer is None and not self.watched and self.kept is None

    def keeps_rows_at(self, layer: int) -> bool:
        """True if ``kept`` concerns a layer: one that reads another's keys or, if there is none, the last one."""
        return self.spec.reads_another(layer) if self.spec.readers else layer == len(self.spec.layers) - 1

    def wait_for(self, layer: int) -> None:
        """Wait until the pool holds what a layer reads. Call it before anything reads the layer's keys and values."""
        if self.await_layer is not None:
            self.await_layer(layer)


class EndOfPassError(Exception):
    """Ends a pass in its ``last_layer``. It propagates through the model's code."""


class Absorbing:
    """Attention that stores keys and values in another form than its stock code uses."""

    def enter_attention(self, query: Tensor) -> Tensor:
        """Convert queries, (1, heads, rows, width), to the form of the stored keys."""
        raise NotImplementedError

    def leave_attention(self, output: Tensor) -> Tensor:
        """Convert sums of stored values, (1, rows, heads, width), to sums of the stock code's values."""
        raise NotImplementedError


_carried: ContextVar[PassContext | None] = ContextVar("inlay_pass", default=None)
_carrying: WeakSet[nn.Module] = WeakSet()


def carry(model: PreTrainedModel) -> None:
    """Let ``carried_pass`` and ``attend`` find the pass of a model that drops keyword arguments.

    A second call for the same model does nothing.
    """
    if model in _carrying:
        return
    _carrying.add(model)
    model.register_forward_pre_hook(_take_up, with_kwargs=True)
    model.register_forward_hook(_lay_down, always_call=True)


def carried_pass() -> PassContext | None:
    """Return the pass that runs in this thread through a model that carries it. None if stock code was called."""
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
    """Store the new keys and values of one layer, then attend by the plan of the pass.

    A layer that reads the keys of an earlier one is called with those keys. They are written once more to the same
    slots, which changes nothing.

    Args:
        module: The attention of the layer, with its ``layer_idx``.
        inlay: The context of the pass. None: ``carried_pass`` returns it.
        said: The keywords of ``options_of``.

    Returns:
        (1, rows, heads, head_dim), and None in place of attention weights.

    Raises:
        EndOfPassError: In the ``last_layer`` of the pass, after its keys are stored.
    """
    inlay = inlay or carried_pass()
    assert inlay is not None, "the pass got lost between the model's call and its layers"
    assert attention_mask is None, "transformers built a mask for an implementation that takes none"
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    layer, plan = inlay.spec.source(layer_idx), inlay.plan
    options = options_of(inlay.spec.layers[layer], query.shape[-1], **said)
    if inlay.kept is not None and inlay.keeps_rows_at(layer_idx):
        if not inlay.spec.readers:
            inlay.pool.write(layer, plan.slots, key[0], value[0])
            query = query[:, :, inlay.kept.rows]  # a reader has only these rows
        plan, key, value = inlay.kept.plan, key[:, :, inlay.kept.rows], value[:, :, inlay.kept.rows]
    if isinstance(module, Absorbing):
        query = module.enter_attention(query)
    if layer == inlay.last_layer:
        inlay.pool.write(layer, inlay.plan.slots, key[0], value[0])
        raise EndOfPassError
    inlay.wait_for(layer)
    output = inlay.backend.attend(query[0], key[0], value[0], inlay.pool, plan, layer, options).unsqueeze(0)
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
    """Return the options of a layer's attention from the keywords that transformers' code passes to an implementation.

    Args:
        spec: The layer.
        head_dim: Elements of a query head. The default ``scaling`` is 1 / √head_dim.
        slopes: The slopes of ALiBi, which only inlay's own replacements pass.
    """
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
# the name before all blocks, then the names of the open blocks
_in_use: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch a model to another attention implementation ("inlay", "sdpa", "eager") within a block.

    Blocks of several threads may overlap if they use the same name. This happens with two engines on one model.
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
