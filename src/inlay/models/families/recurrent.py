"""Families with recurrent or convolution layers, alone or beside attention.

Such a layer folds the text before a token into a state of fixed size. The state is kept at chosen tokens, so a prompt
that begins like an earlier one continues from there. A module has no state of its own: the state behind it depends on
all text before it. So these families reuse exact prefixes and no modules.

A model type is listed here after it passes ``tests/families/recurrent.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inlay.attention.rope import UNTURNED
from inlay.models.allows import Allows, windows_of
from inlay.models.interface import carry
from inlay.models.mixers.rebound import is_mixer, rebind
from inlay.models.spec import LayerSpec, ModelSpec
from inlay.models.standard import ROUTERS, Standard, head_dim
from inlay.models.unshared import positions_of

REASON = "their recurrent layers carry a state of all text before a module, so a module has none of its own"


class Recurrent(Standard):
    """Families whose mixers use the operations in ``models/mixers``."""

    model_types: ClassVar[tuple[str, ...]] = (
        *("bamba", "falcon_h1", "jamba", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    )
    fixed = REASON
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
            recurrent=f"models of type '{config.model_type}' reuse exact prefixes and no modules: {REASON}",
            attending=self.attending(model),
        )

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        rebind(model)


def _attends(module: nn.Module) -> bool:
    keys = hasattr(module, "k_proj") or hasattr(module, "kv_b_proj")
    return keys and hasattr(module, "layer_idx") and not is_mixer(module)


FAMILY = Recurrent()
