"""Mamba, Mamba-2 and Falcon Mamba: recurrent layers alone, without keys and values."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from inlay.models.families.recurrent import Recurrent
from inlay.models.linear import MakeLinear


class Mamba(Recurrent):
    """Stock code reads the dtype of the head's weight, so the head stays unpacked."""

    model_types: ClassVar[tuple[str, ...]] = ("falcon_mamba", "mamba", "mamba2")

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """See Family.fuse."""
        return part if isinstance(part, nn.Linear) else super().fuse(path, part, make)


FAMILY = Mamba()
