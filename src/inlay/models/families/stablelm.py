"""StableLM and Nemotron: rotary in part of a head; their layers do not hand keyword arguments on to attention."""

from __future__ import annotations

from transformers import PreTrainedModel

from inlay.models.interface import carry
from inlay.models.standard import Standard


class StableLm(Standard):
    """The pass is carried past the layers; attention itself goes through the interface."""

    model_types = ("nemotron", "stablelm")

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)


FAMILY = StableLm()
