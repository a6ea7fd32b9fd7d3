"""Hunyuan: keys are normed after rotation, with a weight for each dimension, so no rotation of a query can shift
them.
"""

from __future__ import annotations

from inlay.models.standard import ROUTERS, Standard


class Hunyuan(Standard):
    """Hunyuan. The router of its experts is one module deeper than in other families."""

    model_types = ("hunyuan_v1_dense", "hunyuan_v1_moe")
    fixed = "keys are normed after their rotation, so no turn of the query can move them"
    unpacked = (*ROUTERS, "wg")


FAMILY = Hunyuan()
