"""What inlay has to know of a family of models before it serves one: the contract of each file in ``families/``.

A family's arithmetic is that of its stock transformers code. What a family says here is what inlay cannot ask that
code: the shape of the KV and the frequencies it is rotated by, which configurations would give wrong answers, which
modules may be joined, and what to replace where attention does not go through transformers' AttentionInterface.

Chat is not among it: turns follow the tokenizer's own template, and so do the tool calls in answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay.models.allows import Allows, shifts_of, windows_of
from inlay.models.linear import MakeLinear, joined
from inlay.models.quantized import check_quantized, settings_of
from inlay.models.spec import LayerSpec, ModelSpec

#: Rotary scalings whose frequencies are the same for all positions that a model has.
_SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


class Family(ABC):
    """One family of models. Only ``layers`` must be given; the rest are steps that a family may add to.

    model_types: the ``model_type`` of the configurations that it serves.
    fixed: why no segment can be read at a shift although positions would allow it; None where it can.
    sinks, latent, joined: see Allows.
    """

    model_types: ClassVar[tuple[str, ...]]
    fixed: ClassVar[str | None] = None
    sinks: ClassVar[bool] = False
    latent: ClassVar[bool] = False
    joined: ClassVar[bool] = False

    def check(self, config: PretrainedConfig) -> None:
        """Raise ModelError, with the reason, if a model of this configuration cannot be served."""
        for scaling in _scalings(config):
            if scaling not in _SCALINGS:
                raise ModelError(f"rotary scaling '{scaling}' is not supported; use one of {', '.join(_SCALINGS)}")
        if (settings := settings_of(config)) is not None:
            check_quantized(settings)

    def layer_positions(self, config: PretrainedConfig) -> tuple[str, ...]:
        """How positions enter each layer: "rotary", "alibi", "learned" (or another sum with the embeddings), "none"."""
        return ("rotary",) * config.num_hidden_layers

    def allows(self, config: PretrainedConfig) -> Allows:
        """What may be asked of a model of this configuration, which ``check`` lets pass."""
        shifts = shifts_of(self.layer_positions(config))
        reason = self.fixed or (None if shifts else "positions are learned, which no turn of the query can move")
        return Allows(
            exact=True,
            modular=True,
            shifts=shifts if reason is None else None,
            reason=reason,
            windows=windows_of(config),
            sinks=self.sinks,
            latent=self.latent,
            joined=self.joined,
        )

    @abstractmethod
    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """The KV of every layer of a stock model, in the order of ``layer_idx``."""

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """What the rest of inlay needs to know of a stock model."""
        config = model.config
        return ModelSpec(config.model_type, self.layers(model), positions_of(config), config.vocab_size, self.fixed)

    def patch(self, model: PreTrainedModel) -> None:  # noqa: B027  (most families need none)
        """Make a stock model, whose weights may not be there yet, attend through inlay where its code does not.

        Nothing where its layers call the AttentionInterface and hand keyword arguments on to it. Else: replace the
        ``forward`` of what stands between the model's call, which gets ``position_ids`` and ``inlay``, and its
        attention, which has to call ``interface.attend`` if ``inlay`` came, and be as it was if not.
        """

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """What stands in the place of a part of a model: the part itself, changed inside, or another module.

        path: where the part stands. A part is a layer, or a module beside the layers such as the last norm.
        make: makes a linear layer, packed or quantized. What it does not make stays as transformers has it.
        """
        if isinstance(part, nn.Linear):  # lm_head; where it is tied, the embedding keeps the weight
            return joined([part], make, shared=True)
        return part


def positions_of(config: PretrainedConfig) -> int:
    """How many positions a model has whose stored states fit each other: to where its frequencies change for all.

    "longrope" takes other ones for texts beyond the original context, and "dynamic" for texts beyond the whole context.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    borders = [each["original_max_position_embeddings"] for each in sets if each.get("rope_type") == "longrope"]
    return int(min((config.max_position_embeddings, *borders)))


def note_of(config: PretrainedConfig) -> str | None:
    """What a user should know of the model's context; None for nothing."""
    most: int | None = getattr(config, "max_position_embeddings", None)
    if most is None or positions_of(config) == most:
        return None
    return (
        f"its context is {positions_of(config):,} tokens here, not {most:,}: for longer texts its rotary scaling "
        "'longrope' has other frequencies at all positions, so that stored states would not fit"
    )


def _scalings(config: PretrainedConfig) -> tuple[str, ...]:
    """The rotary scalings of a model, of which each type of layer may have its own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return tuple(dict.fromkeys(each.get("rope_type", "default") for each in sets))
