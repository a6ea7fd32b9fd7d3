"""Gemma 4 Unified: the layers of Gemma 4 without embeddings for each layer and without experts."""

from __future__ import annotations

from inlay.models.families.gemma4 import SharedKV


class Gemma4Unified(SharedKV):
    """The text model of Gemma 4 Unified. Its passes compute all rows in all layers, unless they want no logits."""

    model_types = ("gemma4_unified_text",)


FAMILY = Gemma4Unified()
