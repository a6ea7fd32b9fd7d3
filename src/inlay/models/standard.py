"""What is the same in most families: attention through the interface, heads of one shape, every linear layer packed.

A family says in class attributes and ``rotates`` how its positions enter, because no two modeling files say it alike.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inlay.attention.rope import UNTURNED, Rotary
from inlay.models.family import Family
from inlay.models.linear import MakeLinear, joined
from inlay.models.spec import LayerSpec

#: What chooses experts: a choice that is rounded is another choice, and stock code reads some of these weights.
ROUTERS = ("gate", "router", "shared_expert_gate")


class Standard(Family):
    """A decoder whose layers all attend through the interface.

    positions: "rotary", "alibi", "learned" (or any other sum with the embeddings), or "none".
    interleaved: whether the halves of a rotated pair lie side by side.
    multi_head: whether every head has keys and values of its own, whatever the configuration says.
    unpacked: names of linear layers whose weights stay as they are.
    """

    positions: ClassVar[str] = "rotary"
    interleaved: ClassVar[bool] = False
    multi_head: ClassVar[bool] = False
    unpacked: ClassVar[tuple[str, ...]] = ROUTERS

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """Whether a layer of a rotary family turns its queries and keys."""
        return True

    def kv_heads(self, config: PretrainedConfig) -> int:
        """Heads of keys and values; without a number of their own there is one for each query."""
        named = None if self.multi_head else getattr(config, "num_key_value_heads", None)
        return named or int(config.num_attention_heads)

    def masked_window(self, config: PretrainedConfig) -> int | None:
        """A sliding window of all layers that stock code tells to its mask and not to attention."""
        return None

    def layer_positions(self, config: PretrainedConfig) -> tuple[str, ...]:
        """Rotary layers among which some do not rotate have layers without positions."""
        if self.positions != "rotary":
            return (self.positions,) * config.num_hidden_layers
        return tuple("rotary" if self.rotates(config, i) else "none" for i in range(config.num_hidden_layers))

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """Heads as the configuration has them; each layer's frequencies as its rotary module has them."""
        config = model.config
        heads, width = self.kv_heads(config), head_dim(config)
        return tuple(
            LayerSpec(heads, width, self.rotary(model, i, positions), window=self.masked_window(config))
            for i, positions in enumerate(self.layer_positions(config))
        )

    def rotary(self, model: PreTrainedModel, layer: int, positions: str) -> Rotary | None:
        """How a shift turns a layer's queries."""
        match positions:
            case "rotary":
                module: Any = model.base_model.rotary_emb
                kinds = getattr(model.config, "layer_types", None)
                own = getattr(module, f"{kinds[layer]}_inv_freq", None) if kinds else None
                frequencies = module.inv_freq if own is None else own
                return Rotary(frequencies.detach().float().cpu().clone(), self.interleaved)
            case "learned":
                return None
        return UNTURNED

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """Pack every linear layer of a layer, each by itself. Experts keep their weights in one tensor, as it is."""
        if path.rpartition(".")[2].isdigit():
            pack_linears(part, make, without=self.unpacked)
        return super().fuse(path, part, make)


def pack_linears(part: nn.Module, make: MakeLinear, *, without: tuple[str, ...] = ()) -> None:
    """Pack the linear layers inside a module. without: names of those whose weights are read by others."""
    for path, module in list(part.named_modules()):
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] not in without:
            part.set_submodule(path, joined([module], make))


def head_dim(config: PretrainedConfig) -> int:
    """Elements of one head's key."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)
