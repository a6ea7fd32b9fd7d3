"""Gemma 3n: last layers without keys of their own, and four streams beside the text that each layer predicts."""

from __future__ import annotations

from inlay.models.families.gemma4 import SharedKV
from inlay.models.standard import ROUTERS


class Gemma3n(SharedKV):
    """Gemma 3n. All layers have heads of one shape. The small products of its streams stay stock."""

    model_types = ("gemma3n_text",)
    unpacked = (*ROUTERS, "modality_router", "prediction_coefs", "correction_coefs")


FAMILY = Gemma3n()
