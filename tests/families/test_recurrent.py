"""Families with recurrent layers against stock transformers: all of them with ``make test-families``."""

from __future__ import annotations

import pytest

from inlay.models.families import FAMILIES

from .configs import RECURRENT
from .recurrent import CHECKS

#: One of each operation: gated delta rule, Mamba-2, convolutions alone, Mamba, Kimi's delta attention.
SHORT = ("qwen3_5_text", "granitemoehybrid", "lfm2", "mamba", "kimi_linear")
SHORT_CHECKS = ("prefixes", "batches", "preemption")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_a_recurrent_family(name, check):
    CHECKS[check](name)


def test_every_recurrent_family_has_a_tiny_model():
    recurrent = {kind for kind, family in FAMILIES.items() if hasattr(family.otherwise or family, "attending")}
    assert set(RECURRENT) == recurrent
