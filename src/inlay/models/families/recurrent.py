"""Families with recurrent or convolution layers, alone or beside attention.

Such a layer folds the text before a token into a state of fixed size. The state is kept at chosen tokens, so a prompt
that begins like an earlier one continues from there. For most of these families a module has no state of its own: the
state behind it depends on all text before it. So they reuse exact prefixes and no modules. The state of a short
convolution depends on a few tokens alone, so such a family reads modules, each with the state behind its last token.

A model type is listed here after it passes ``tests/model/families/recurrent.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inlay.attention.rope import UNTURNED
from inlay.models.families.deepseek import DeepseekV3, absorb
from inlay.models.family import Allows, windows_of
from inlay.models.fused import FusedMLP, FusedNorm
from inlay.models.interface import carry
from inlay.models.linear import MakeLinear
from inlay.models.mixers.rebound import is_mixer, rebind
from inlay.models.spec import LayerSpec, ModelSpec
from inlay.models.standard import ROUTERS, Standard, head_dim
from inlay.models.unshared import positions_of

REASON = "their recurrent layers carry a state of all text before a module, so a module has none of its own"


class Recurrent(Standard):
    """Families whose mixers use the operations in ``models/mixers``."""

    model_types: ClassVar[tuple[str, ...]] = (
        *("bamba", "falcon_h1", "jamba", "nemotron_h", "olmo_hybrid"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    )
    fixed: ClassVar[str | None] = REASON
    #: Mamba's own code multiplies with the weight of ``dt_proj``.
    unpacked = (*ROUTERS, "dt_proj")

    def allows(self, config: PretrainedConfig) -> Allows:
        """See Family.allows."""
        return Allows(
            exact=True,
            modular=False,
            shifts=None,
            reason=REASON,
            windows=windows_of(config),
            sinks=self.sinks,
            latent=self.latent,
            joined=False,
        )

    def attending(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the ``layer_idx`` of every layer that attends, in order."""
        modules: Any = model.modules()
        return tuple(sorted({module.layer_idx for module in modules if _attends(module)}))

    def layer(self, model: PreTrainedModel) -> LayerSpec:
        """Return the KV of a layer that attends. Nothing is read at a shift."""
        return LayerSpec(self.kv_heads(model.config), head_dim(model.config), UNTURNED)

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers."""
        return (self.layer(model),) * len(attending) if (attending := self.attending(model)) else ()

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """See Family.spec."""
        config = model.config
        return ModelSpec(
            config.model_type,
            self.layers(model),
            positions_of(config),
            config.vocab_size,
            fixed=f"{config.model_type} has recurrent layers: {REASON}",
            recurrent=True,
            whole=f"models of type '{config.model_type}' reuse exact prefixes and no modules: {REASON}",
            attending=self.attending(model),
        )

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        rebind(model)


def _attends(module: nn.Module) -> bool:
    keys = hasattr(module, "k_proj") or hasattr(module, "kv_b_proj")
    return keys and hasattr(module, "layer_idx") and not is_mixer(module)


class ShortConvolution(Recurrent):
    """LFM2 and LFM3: attention beside short convolutions, whose state is their input at the last few tokens."""

    model_types: ClassVar[tuple[str, ...]] = ("lfm2", "lfm2_moe", "lfm3")
    fixed = None

    def allows(self, config: PretrainedConfig) -> Allows:
        """See Family.allows."""
        return replace(super().allows(config), modular=True, shifts="turned query", reason=None)

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers."""
        heads, width = self.kv_heads(model.config), head_dim(model.config)
        attending = self.attending(model)
        return tuple(LayerSpec(heads, width, self.rotary(model, layer, "rotary")) for layer in attending)

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """See Family.spec."""
        return replace(super().spec(model), fixed=None, whole=None, first_tokens=model.config.conv_L_cache)

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """See Family.fuse. Norms and dense MLPs of LFM2 become one call for each step."""
        if part.__class__.__name__ == "Lfm2RMSNorm":
            return FusedNorm(part)
        for inner, module in list(part.named_modules()):
            if module.__class__.__name__ == "Lfm2RMSNorm":
                part.set_submodule(inner, FusedNorm(module))
            elif module.__class__.__name__ == "Lfm2MLP":
                module.gate_proj, module.up_proj, module.down_proj = module.w1, module.w3, module.w2
                module.act_fn = nn.SiLU()
                part.set_submodule(inner, FusedMLP(module, make))
        return super().fuse(path, part, make)


class Mamba(Recurrent):
    """Mamba, Mamba-2 and Falcon Mamba. Stock code reads the dtype of the head's weight, so it stays unpacked."""

    model_types: ClassVar[tuple[str, ...]] = ("falcon_mamba", "mamba", "mamba2")

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """See Family.fuse."""
        return part if isinstance(part, nn.Linear) else super().fuse(path, part, make)


class KimiLinear(Recurrent):
    """Kimi Linear: delta attention, and latent attention whose latents are stored as DeepSeek's are."""

    model_types = ("kimi_linear",)
    latent = True
    unpacked = DeepseekV3.unpacked

    def layer(self, model: PreTrainedModel) -> LayerSpec:
        """See Recurrent.layer. There is one head, and its values are its keys."""
        config = model.config
        return LayerSpec(1, config.qk_rope_head_dim + config.kv_lora_rank, UNTURNED, shared=True)

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        super().patch(model)
        absorb(model)


class SharedAttention(nn.Module):
    """Base of attention that serves several layers. A call names its layer, which has KV of its own."""

    layer_idx: int

    def forward(self, hidden_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.layer_idx = layer_idx
        return super().forward(hidden_states, layer_idx, *args, **kwargs)


class Zamba2(Recurrent):
    """Zamba2: Mamba-2 layers, some with one of a few shared blocks, which learn their layer from the call."""

    model_types = ("zamba2",)

    def attending(self, model: PreTrainedModel) -> tuple[int, ...]:
        """See Recurrent.attending."""
        return tuple(layer for layer, kind in enumerate(model.config.layer_types) if kind == "hybrid")

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        super().patch(model)
        for module in model.modules():
            if hasattr(module, "layer_block_map") and not isinstance(module, SharedAttention):
                stock = type(module)
                module.__class__ = type(f"Inlay{stock.__name__}", (SharedAttention, stock), {})


class Granite4Hybrid(Recurrent):
    """Granite 4 with recurrent layers."""

    model_types = ("granitemoehybrid",)


class Granite4(Standard):
    """Granite 4 if all layers attend, with rotary positions or none. Such models have the type of the hybrids."""

    model_types = ("granitemoehybrid",)
    otherwise = Granite4Hybrid()
    typical: ClassVar[dict[str, object]] = {"layer_types": ["attention"] * 32, "position_embedding_type": "rope"}

    def serves(self, config: PretrainedConfig) -> bool:
        """See Family.serves."""
        return set(config.layer_types) <= {"attention", "full_attention"}

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.position_embedding_type == "rope")


SERVED = (Recurrent(), ShortConvolution(), Mamba(), KimiLinear(), Zamba2(), Granite4())
