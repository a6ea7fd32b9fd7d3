"""The features that a model supports, by its family and configuration. The probe at load verifies shifts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

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
