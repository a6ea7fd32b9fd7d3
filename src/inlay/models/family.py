"""The properties of a family of models that inlay needs before it serves one. The files in ``families/`` define them.

A family computes with its stock transformers code. The properties here cannot be read from that code. They are the
shape of the KV, the frequencies that rotate it, and the modules that may be joined. They also name configurations that
would give wrong answers, and replacements where attention does not go through transformers' AttentionInterface.

Chat is not part of a family. Turns and the tool calls in answers follow the tokenizer's own template.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay.models.linear import MakeLinear, joined
from inlay.models.quantized import check_quantized, settings_of
from inlay.models.spec import LayerSpec, ModelSpec

#: Kind of positions of a layer → how its segments are read at a shift.
_SHIFTS = {
    "rotary": "turned query",
    "alibi": "biased distance",
    "none": "no positions",
}


@dataclass(frozen=True, slots=True)
class Allows:
    """The features that a model supports.

    Args:
        exact: Answers with and without exact reuse equal the stock model's.
        modular: Modules may be read at the positions of their schema.
        shifts: How segments are read at a shift, in words. None: not at all.
        reason: Why there are no shifts. None if there are.
        windows: The sliding window of each layer that has one.
        sinks: Attention sinks take part in the softmax.
        latent: One latent is stored for all heads.
        joined: Products are joined, and each step between them is one call. False: layers are packed one by one.
    """

    exact: bool
    modular: bool
    shifts: str | None
    reason: str | None
    windows: tuple[int, ...]
    sinks: bool
    latent: bool
    joined: bool

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return named | {"windows": sorted(set(self.windows))}


def shifts_of(positions: Sequence[str]) -> str | None:
    """Return how segments are read at a shift with these positions of the layers. None: not at all."""
    if any(each not in _SHIFTS for each in positions):
        return None
    return ", ".join(_SHIFTS[each] for each in dict.fromkeys(positions))


def windows_of(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the sliding window of each layer that has one, from the configuration."""
    declared = "sliding_window" in getattr(config, "__dataclass_fields__", {})  # else the stock code does not use it
    window = getattr(config, "sliding_window", None)
    if window is None or not declared:
        return ()
    kinds = getattr(config, "layer_types", None)
    sliding = config.num_hidden_layers if kinds is None else list(kinds).count("sliding_attention")
    return (int(window),) * sliding


#: Rotary scalings with the same frequencies for all positions of a model.
_SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")


class Family(ABC):
    """One family of models. Only ``layers`` is required. A family may extend the other steps.

    Attributes:
        model_types: The ``model_type`` values that it serves.
        typical: Settings of a usual checkpoint, if the defaults of the configuration belong to another family.
        otherwise: The family of configurations of its types that it does not serve. None: they run without reuse.
        fixed: The reason against shifts, if the positions alone would allow them. None: no such reason.
        sinks, latent, joined: See Allows.
    """

    model_types: ClassVar[tuple[str, ...]]
    typical: ClassVar[Mapping[str, Any]] = {}
    otherwise: ClassVar[Family | None] = None
    fixed: ClassVar[str | None] = None
    sinks: ClassVar[bool] = False
    latent: ClassVar[bool] = False
    joined: ClassVar[bool] = False

    def serves(self, config: PretrainedConfig) -> bool:
        """True if a model of this configuration belongs to the family; see ``otherwise``."""
        return True

    def check(self, config: PretrainedConfig) -> None:
        """Raise ModelError, with the reason, if a model of this configuration cannot be served."""
        if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
            raise ModelError(
                "use_bidirectional_attention is set, so every token attends to later ones, and no text can be "
                "continued; give a causal model",
                code="model.unsupported_setting",
            )
        for scaling in _scalings(config):
            if scaling not in _SCALINGS:
                raise ModelError(
                    f"rotary scaling '{scaling}' is not supported; use one of {', '.join(_SCALINGS)}",
                    code="model.unsupported_setting",
                )
        if (settings := settings_of(config)) is not None:
            check_quantized(settings)

    def layer_positions(self, config: PretrainedConfig) -> tuple[str, ...]:
        """Return the kind of positions of each layer: "rotary", "alibi", "learned" (added to the embeddings) or
        "none".
        """
        return ("rotary",) * config.num_hidden_layers

    def allows(self, config: PretrainedConfig) -> Allows:
        """Return the features that a model of this configuration supports. ``check`` must accept it."""
        shifts = shifts_of(self.layer_positions(config))
        learned = "positions are learned, so a module is read only where it was encoded"
        reason = self.fixed or (None if shifts else learned)
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
        """Return the KV of every layer of a stock model, in the order of ``layer_idx``."""

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        """Return the ModelSpec of a stock model."""
        config = model.config
        return ModelSpec(
            config.model_type,
            self.layers(model),
            positions_of(config),
            config.vocab_size,
            self.fixed,
            limit=limit_of(config),
        )

    def patch(self, model: PreTrainedModel) -> None:  # noqa: B027  (most families need none)
        """Make a stock model attend through inlay if its code does not. Its weights may not be loaded yet.

        Nothing is needed if the layers call the AttentionInterface and pass keyword arguments on to it. Else, replace
        the ``forward`` methods between the model's call, which gets ``position_ids`` and ``inlay``, and its attention.
        With ``inlay`` the new code must call ``interface.attend``, and without it it must behave like stock code.
        """

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """Return the replacement of a part of a model: the part itself, changed inside, or another module.

        Args:
            path: The path of the part in the model.
            part: A layer, or a module beside the layers, such as the last norm.
            make: Makes a linear layer, packed or quantized. Other modules stay stock.
        """
        if isinstance(part, nn.Linear):  # lm_head; if it is tied, the embedding keeps the weight
            return joined([part], make, shared=True)
        return part


def body_name(model: PreTrainedModel) -> str:
    """Return the attribute of a causal model that holds its decoder, without the head.

    Llama 4 names the attribute of its multimodal model instead.
    """
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


def positions_of(config: PretrainedConfig) -> int:
    """Return the number of positions at which a model is served."""
    return int(min((config.max_position_embeddings, *_borders(config).values())))


def limit_of(config: PretrainedConfig) -> str | None:
    """Return the reason why a model is served at fewer positions than its configuration has. None: at all of them."""
    borders = _borders(config)
    reason = min(borders, key=borders.__getitem__, default=None)
    return reason if reason is not None and borders[reason] < config.max_position_embeddings else None


def note_of(config: PretrainedConfig) -> str | None:
    """Return a note for users about the model's context, or None."""
    most: int | None = getattr(config, "max_position_embeddings", None)
    limit = None if most is None else limit_of(config)
    if limit is None:
        return None
    return f"its context is {positions_of(config):,} tokens here, not {most:,}: {limit}"


def _borders(config: PretrainedConfig) -> dict[str, int]:
    """Return the reasons why a model of this configuration is served at fewer positions than it has, each with the
    number of positions.

    "longrope" changes all frequencies for texts beyond the original context, "dynamic" beyond the whole context.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    borders = {}
    if longrope := [each["original_max_position_embeddings"] for each in sets if each.get("rope_type") == "longrope"]:
        borders[
            "for longer texts its rotary scaling 'longrope' has other frequencies at all positions, so that stored "
            "states would not fit"
        ] = min(longrope)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds:
        size = config.attention_chunk_size
        borders[f"in longer texts its layers attend within chunks of {size:,} positions, which inlay lacks"] = size
    if getattr(config, "attn_temperature_tuning", False) and "full_attention" in kinds:
        borders["in longer texts its queries are scaled by their position, which inlay lacks"] = config.floor_scale - 1
    return borders


def _scalings(config: PretrainedConfig) -> tuple[str, ...]:
    """The rotary scalings of a model. Each type of layer may have its own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return tuple(dict.fromkeys(each.get("rope_type", "default") for each in sets))
