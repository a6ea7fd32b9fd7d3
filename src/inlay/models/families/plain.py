"""Families without special properties: rotary in halves of a head, all attention through the interface.

A model type is listed here after its unchanged stock code passes the suite in ``tests/families``.
"""

from __future__ import annotations

from inlay.models.standard import Standard


class Plain(Standard):
    """Plain families. Windows, caps, sinks, norms and experts are in the stock modules."""

    model_types = (
        *("apertus", "arcee", "aria_text", "bitnet", "cwm", "dots1", "flex_olmo", "gemma", "gemma2"),
        *("gemma3_text", "glm4_moe", "granite", "granitemoe", "granitemoeshared", "hy_v3", "hyperclovax"),
        *("internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "mellum", "minimax_m2", "mixtral", "olmo"),
        *("olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2_moe", "qwen3_moe", "seed_oss", "solar_open"),
        *("starcoder2", "vaultgemma"),
    )


FAMILY = Plain()
