"""Ministral 3: Llama's layers. Queries beyond the first training length are scaled by their position."""

from __future__ import annotations

from inlay.models.standard import Standard


class Ministral3(Standard):
    """Ministral 3. Scores depend on more than the distance. The probe uses small positions and cannot detect this."""

    model_types = ("ministral3",)
    fixed = "queries are scaled by their position, so a score depends on more than the distance"


FAMILY = Ministral3()
