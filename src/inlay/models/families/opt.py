"""OPT and BioGPT: positions are learned and added to the embeddings, so segments stay where they are."""

from __future__ import annotations

from inlay.models.standard import Standard


class Opt(Standard):
    """Every head has its own keys and values."""

    model_types = ("biogpt", "opt")
    positions = "learned"
    multi_head = True


FAMILY = Opt()
