"""StableLM and Nemotron: rotary in part of a head. Their layers do not pass keyword arguments on to attention."""

from __future__ import annotations

from transformers import PreTrainedModel

from inlay.models.interface import carry
from inlay.models.standard import Standard


class StableLm(Standard):
    """StableLM and Nemotron. The pass is carried past the layers; attention itself goes through the interface."""

    model_types = ("nemotron", "stablelm")

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)


FAMILY = StableLm()
