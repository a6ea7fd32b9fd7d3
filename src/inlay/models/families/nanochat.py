"""nanochat: pairs turn the other way round. Its norm behind the rotation has no weights, so a turn goes through it."""

from __future__ import annotations

from transformers import PreTrainedModel

from inlay.attention.rope import Rotary
from inlay.models.standard import Standard


class NanoChat(Standard):
    """Everything else is in the stock modules."""

    model_types = ("nanochat",)

    def rotary(self, model: PreTrainedModel, layer: int, positions: str) -> Rotary | None:
        """Frequencies below zero."""
        stock = super().rotary(model, layer, positions)
        return None if stock is None else Rotary(-stock.inverse_frequencies)


FAMILY = NanoChat()
