"""Gemma 4: head sizes of two kinds, embeddings for each layer, and last layers that read the keys of earlier ones.

The last ``num_kv_shared_layers`` layers have no keys and values. Each reads those of the last layer before them with
its kind of attention. Only the rows with logits are needed there, so a pass computes no other row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from inlay.models.interface import PassContext
from inlay.models.spec import LayerSpec, ModelSpec
from inlay.models.standard import ROUTERS, Standard


class InlayGemma4TextModel(Gemma4TextModel):
    """Gemma4TextModel that keeps the wanted rows of a pass. It behaves like the stock class if none are named."""

    def _maybe_slice_kv_shared_inputs(
        self,
        hidden_states: Tensor,
        per_layer_inputs: Tensor | None,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        causal_mask_mapping: dict[str, Tensor | None],
        logits_to_keep: int | Tensor,
        past_key_values: Any,
        **kwargs: Any,
    ) -> Any:
        """See Gemma4TextModel. It is called once, before the first layer without keys of its own."""
        inlay: PassContext | None = kwargs.get("inlay")
        if inlay is None:
            return super()._maybe_slice_kv_shared_inputs(
                hidden_states,
                per_layer_inputs,
                position_embeddings,
                causal_mask_mapping,
                logits_to_keep,
                past_key_values,
                **kwargs,
            )
        if inlay.kept is not None:
            rows = inlay.kept.rows
            hidden_states = hidden_states[:, rows]
            per_layer_inputs = None if per_layer_inputs is None else per_layer_inputs[:, rows]
            position_embeddings = {
                kind: (cos[:, rows], sin[:, rows]) for kind, (cos, sin) in position_embeddings.items()
            }
        return hidden_states, per_layer_inputs, position_embeddings, causal_mask_mapping


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
        return replace(super().spec(model), keeps_rows=hasattr(Gemma4TextModel, "_maybe_slice_kv_shared_inputs"))

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        for module in model.modules():
            if type(module) is Gemma4TextModel:
                module.__class__ = InlayGemma4TextModel


FAMILY = Gemma4()
