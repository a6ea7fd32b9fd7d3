"""Ministral 3: Llama's layers, with queries scaled by their position once that is beyond the first training length."""

from __future__ import annotations

from inlay.models.standard import Standard


class Ministral3(Standard):
    """Not the distance alone decides what a score is, which the probe, at small positions, cannot see."""

    model_types = ("ministral3",)
    fixed = "queries are scaled by their position, so a score depends on more than the distance"


FAMILY = Ministral3()
