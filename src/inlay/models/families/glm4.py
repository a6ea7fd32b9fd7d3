"""GLM-4 and others with adjacent elements of a rotated pair (GPT-J's layout), in part of a head or in all of it."""

from __future__ import annotations

from inlay.models.standard import Standard


class Glm4(Standard):
    """GLM-4 and similar models. Other differences from Llama are in the stock modules."""

    model_types = ("cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
    interleaved = True


FAMILY = Glm4()
