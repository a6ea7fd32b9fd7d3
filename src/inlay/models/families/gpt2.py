"""GPT-2: learned positions, so no shift. Query, key and value are one product already, with a transposed weight."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import NewGELUActivation

from inlay.errors import ModelError
from inlay.models.family import Family
from inlay.models.linear import MakeLinear, of_conv1d
from inlay.models.spec import LayerSpec


class GPT2(Family):
    """GPT-2. Every head has its own keys and values."""

    model_types = ("gpt2",)
    joined = True

    def check(self, config: PretrainedConfig) -> None:
        """See Family.check. Rejects options that bypass the AttentionInterface."""
        if getattr(config, "reorder_and_upcast_attn", False):
            raise ModelError(
                "GPT-2 with reorder_and_upcast_attn is not supported; set it to false in config.json",
                code="model.unsupported_setting",
            )
        if getattr(config, "add_cross_attention", False):
            raise ModelError(
                "GPT-2 with add_cross_attention is not supported, because it also attends to the text of an encoder; "
                "give a GPT-2 without it",
                code="model.unsupported_setting",
            )
        super().check(config)

    def layer_positions(self, config: PretrainedConfig) -> tuple[str, ...]:
        """See Family.layer_positions. Positions are added to the embeddings."""
        return ("learned",) * config.n_layer

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers. Keys are not rotated."""
        config = model.config
        return (LayerSpec(config.n_head, config.n_embd // config.n_head, rotary=None),) * config.n_layer

    def fuse(self, path: str, part: Any, make: MakeLinear) -> nn.Module:
        """Transpose the weights of each block's products. There is nothing to join."""
        match path.split("."):
            case [*_, "h", _]:
                part.attn.c_attn = of_conv1d(part.attn.c_attn, make)
                part.attn.c_proj = of_conv1d(part.attn.c_proj, make)
                part.mlp.c_fc = of_conv1d(part.mlp.c_fc, make)
                part.mlp.c_proj = of_conv1d(part.mlp.c_proj, make)
                if isinstance(part.mlp.act, NewGELUActivation):
                    part.mlp.act = nn.GELU("tanh")  # the same function in one call
        return super().fuse(path, part, make)


SERVED = (GPT2(),)
