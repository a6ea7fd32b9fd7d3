"""GLM-4 and others whose rotated pairs lie side by side (GPT-J's layout), in part of a head or in all of it."""

from __future__ import annotations

from inlay.models.standard import Standard


class Glm4(Standard):
    """What differs from Llama besides the layout of pairs is in the stock modules."""

    model_types = ("cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
    interleaved = True


FAMILY = Glm4()
