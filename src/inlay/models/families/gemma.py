"""Gemma 4: head sizes of two kinds, embeddings for each layer, and last layers that read the keys of earlier ones.

The last ``num_kv_shared_layers`` layers have no keys and values. Each reads those of the last layer before them with
its kind of attention. Only the rows with logits are needed there, so a pass computes no other row.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any, ClassVar

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from inlay.models.interface import PassContext
from inlay.models.spec import LayerSpec, ModelSpec
from inlay.models.standard import ROUTERS, Standard

#: Stock code drops rows here. Older releases of transformers compute all rows.
_METHOD = "_maybe_slice_kv_shared_inputs"


def _wanted_rows(
    model: Gemma4TextModel,
    hidden_states: Tensor,
    per_layer_inputs: Tensor | None,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace the stock method, which is called once, before the first layer without keys of its own.

    Returns:
        The arguments with the rows of ``PassContext.kept`` alone, or with all rows if the pass names none. Without a
        pass, what the stock method returns.
    """
    inlay: PassContext | None = kwargs.get("inlay")
    if inlay is None:
        given = hidden_states, per_layer_inputs, position_embeddings
        return Gemma4TextModel._maybe_slice_kv_shared_inputs(model, *given, *args, **kwargs)
    if inlay.kept is not None:
        rows = inlay.kept.rows
        hidden_states = hidden_states[:, rows]
        per_layer_inputs = None if per_layer_inputs is None else per_layer_inputs[:, rows]
        position_embeddings = {kind: (cos[:, rows], sin[:, rows]) for kind, (cos, sin) in position_embeddings.items()}
    masks = args[0]
    return hidden_states, per_layer_inputs, position_embeddings, masks


class SharedKV(Standard):
    """Models with last layers that read the keys and values of earlier ones. The heads of each layer are its own."""

    def sources(self, config: PretrainedConfig) -> tuple[int, ...]:
        """Return, for each layer, the layer with the keys and values that it reads."""
        own = config.num_hidden_layers - config.num_kv_shared_layers
        latest: dict[str, int] = {}
        found = []
        for layer, kind in enumerate(config.layer_types):
            if layer < own:
                latest[kind] = layer
            found.append(latest[kind])
        return tuple(found)

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers. Heads come from the attention of each layer."""
        config: Any = model.config
        body: Any = model.base_model
        found = []
        for i, source in enumerate(self.sources(config)):
            if source == i:
                attention = body.layers[i].self_attn
                heads = config.num_attention_heads // attention.num_key_value_groups
                found.append(LayerSpec(heads, attention.head_dim, self.rotary(model, i, "rotary")))
        return tuple(found)

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """See Family.spec."""
        return replace(super().spec(model), sources=self.sources(model.config))


class Gemma4(SharedKV):
    """Gemma 4, dense and with experts. Some models compute keys and values from one product, and both are stored."""

    model_types = ("gemma4_text",)
    unpacked: ClassVar[tuple[str, ...]] = (*ROUTERS, "proj")  # the router's product

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """See Family.spec."""
        return replace(super().spec(model), keeps_rows=hasattr(Gemma4TextModel, _METHOD))

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        for module in model.modules():
            if type(module) is Gemma4TextModel and hasattr(module, _METHOD):
                setattr(module, _METHOD, MethodType(_wanted_rows, module))


class Gemma3n(SharedKV):
    """Gemma 3n. All layers have heads of one shape. The small products of its streams stay stock."""

    model_types = ("gemma3n_text",)
    unpacked = (*ROUTERS, "modality_router", "prediction_coefs", "correction_coefs")


class Gemma4Unified(SharedKV):
    """The text model of Gemma 4 Unified. Its passes compute all rows in all layers, unless they want no logits."""

    model_types = ("gemma4_unified_text",)


SERVED = (Gemma3n(), Gemma4(), Gemma4Unified())
