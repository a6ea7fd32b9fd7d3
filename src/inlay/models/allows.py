"""What may be asked of a model, told from its family and its configuration; the probe at load proves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

#: How positions enter a layer → how a segment of it is read elsewhere.
_SHIFTS = {
    "rotary": "turned query",
    "alibi": "biased distance",
    "none": "no positions",
}


@dataclass(frozen=True, slots=True)
class Allows:
    """What may be asked of a model.

    exact: whether answers with and without exact reuse equal the stock model's.
    modular: whether modules may be read at the positions of their schema.
    shifts: how segments are read elsewhere than they were encoded, in words; None where they are not.
    reason: why there are no shifts; None where there are.
    windows: the sliding window of each layer that has one.
    sinks: whether attention sinks take part in the softmax.
    latent: whether one latent is stored for all heads.
    joined: whether products are joined and steps between them are one call each; the others are packed one by one.
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
        """As an object for JSON."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return named | {"windows": sorted(set(self.windows))}


def shifts_of(positions: Sequence[str]) -> str | None:
    """How a segment is read elsewhere where positions enter the layers like this; None where it is not."""
    if any(each not in _SHIFTS for each in positions):
        return None
    return ", ".join(_SHIFTS[each] for each in dict.fromkeys(positions))


def windows_of(config: PretrainedConfig) -> tuple[int, ...]:
    """The sliding window of each layer that has one, as the configuration names them."""
    declared = "sliding_window" in getattr(config, "__dataclass_fields__", {})  # else no code looks at it
    window = getattr(config, "sliding_window", None)
    if window is None or not declared:
        return ()
    kinds = getattr(config, "layer_types", None)
    sliding = config.num_hidden_layers if kinds is None else list(kinds).count("sliding_attention")
    return (int(window),) * sliding
