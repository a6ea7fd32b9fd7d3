"""OPT and BioGPT: positions are learned and added to the embeddings, so segments cannot be shifted."""

from __future__ import annotations

from inlay.models.standard import Standard


class Opt(Standard):
    """OPT and BioGPT. Every head has its own keys and values."""

    model_types = ("biogpt", "opt")
    positions = "learned"
    multi_head = True


FAMILY = Opt()
