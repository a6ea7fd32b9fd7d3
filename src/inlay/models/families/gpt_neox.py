"""GPT-NeoX and Persimmon: query, key and value in one product, rotary in part of a head, as many KV heads as heads."""

from __future__ import annotations

from inlay.models.standard import Standard


class GptNeox(Standard):
    """GPT-NeoX and Persimmon. Other differences are in the stock modules."""

    model_types = ("gpt_neox", "persimmon")
    multi_head = True


FAMILY = GptNeox()
