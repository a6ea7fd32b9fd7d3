"""The common case of a family: attention through the interface, heads of one shape, every linear layer packed.

Class attributes and ``rotates`` describe the positions of a family, because modeling files have no common form for it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inlay.attention.rope import UNTURNED, Rotary
from inlay.models.family import Family, body_name
from inlay.models.linear import MakeLinear, joined
from inlay.models.spec import LayerSpec

#: Modules that choose experts. They stay unrounded, because rounding changes the choice. Stock code reads some of them.
ROUTERS = ("gate", "router", "shared_expert_gate")


class Standard(Family):
    """A decoder with layers that all attend through the interface.

    Attributes:
        positions: "rotary", "alibi", "learned" (or any other sum with the embeddings), or "none".
        interleaved: True if the two elements of a rotated pair are adjacent.
        multi_head: True if every head has its own keys and values, whatever the configuration says.
        unpacked: Names of linear layers that keep their weights unpacked.
    """

    positions: ClassVar[str] = "rotary"
    interleaved: ClassVar[bool] = False
    multi_head: ClassVar[bool] = False
    unpacked: ClassVar[tuple[str, ...]] = ROUTERS

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """Return True if a layer of a rotary family rotates its queries and keys."""
        return True

    def kv_heads(self, config: PretrainedConfig) -> int:
        """Return the number of heads of keys and values: as configured, else one for each query head."""
        named = None if self.multi_head else getattr(config, "num_key_value_heads", None)
        return named or int(config.num_attention_heads)

    def masked_window(self, config: PretrainedConfig) -> int | None:
        """Return a sliding window of all layers that stock code gives only to its mask, or None."""
        return None

    def layer_positions(self, config: PretrainedConfig) -> tuple[str, ...]:
        """See Family.layer_positions. Layers of a rotary family that do not rotate have no positions."""
        if self.positions != "rotary":
            return (self.positions,) * config.num_hidden_layers
        return tuple("rotary" if self.rotates(config, i) else "none" for i in range(config.num_hidden_layers))

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers. Heads come from the configuration, frequencies from each layer's rotary module."""
        config = model.config
        heads, width = self.kv_heads(config), head_dim(config)
        return tuple(
            LayerSpec(heads, width, self.rotary(model, i, positions), window=self.masked_window(config))
            for i, positions in enumerate(self.layer_positions(config))
        )

    def rotary(self, model: PreTrainedModel, layer: int, positions: str) -> Rotary | None:
        """Return how a shift rotates a layer's queries, or None for learned positions."""
        match positions:
            case "rotary":
                body: Any = getattr(model, body_name(model))
                module = getattr(body, "rotary_emb", None) or body.pos_emb  # of LFM2 with experts
                kinds = getattr(model.config, "layer_types", None)
                own = getattr(module, f"{kinds[layer]}_inv_freq", None) if kinds else None
                frequencies = module.inv_freq if own is None else own
                return Rotary(frequencies.detach().float().cpu().clone(), self.interleaved)
            case "learned":
                return None
        return UNTURNED

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """Pack every linear layer separately. Experts keep their weights in one tensor, unpacked."""
        if path.rpartition(".")[2].isdigit() and not isinstance(part, nn.Linear):  # a layer, no product beside them
            pack_linears(part, make, without=self.unpacked)
        return super().fuse(path, part, make)


def pack_linears(part: nn.Module, make: MakeLinear, *, without: tuple[str, ...] = ()) -> None:
    """Pack the linear layers inside a module. without: names of layers with weights that other code reads."""
    for path, module in list(part.named_modules()):
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] not in without:
            part.set_submodule(path, joined([module], make))


def head_dim(config: PretrainedConfig) -> int:
    """Return the elements of one head's key."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)
