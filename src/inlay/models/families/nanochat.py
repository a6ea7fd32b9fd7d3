"""nanochat: pairs rotate in the opposite direction. The norm after the rotation has no weights, so shifts still
work.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from inlay.attention.rope import Rotary
from inlay.models.standard import Standard


class NanoChat(Standard):
    """nanochat. Other differences are in the stock modules."""

    model_types = ("nanochat",)

    def rotary(self, model: PreTrainedModel, layer: int, positions: str) -> Rotary | None:
        """See Standard.rotary. Frequencies are negative."""
        stock = super().rotary(model, layer, positions)
        return None if stock is None else Rotary(-stock.inverse_frequencies)


FAMILY = NanoChat()
