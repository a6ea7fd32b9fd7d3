"""Hunyuan: keys are normed after their rotation, with a weight for each dimension, so no turn of a query moves them."""

from __future__ import annotations

from inlay.models.standard import ROUTERS, Standard


class Hunyuan(Standard):
    """The router of the experts lies one module deeper than in other families."""

    model_types = ("hunyuan_v1_dense", "hunyuan_v1_moe")
    fixed = "keys are normed after their rotation, so no turn of the query can move them"
    unpacked = (*ROUTERS, "wg")


FAMILY = Hunyuan()
