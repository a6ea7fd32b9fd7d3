"""Every family against stock transformers: a short form by default, the whole suite with ``make test-families``."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inlay.models.families import FAMILIES
from inlay.models.refused import REASONS, REFUSED

from .configs import ROWS
from .suite import CHECKS, claims_shifts, shifts_are_allowed

#: A row for each thing that sets families apart.
SHORT = (
    *("bloom", "deepseek_v2", "deepseek_v3", "falcon", "falcon alibi", "gemma3_text", "glm4", "gpt_neox", "gpt_oss"),
    *("hunyuan_v1_dense", "mixtral", "mpt", "nanochat", "opt", "phimoe", "smollm3", "stablelm"),
)
SHORT_CHECKS = ("prefill and decode", "shifts", "windows and sinks")


def cases() -> list[object]:
    """Every row with every check; slow where it is not of the short form."""
    return [
        pytest.param(row, check, marks=() if row in SHORT and check in SHORT_CHECKS else pytest.mark.slow)
        for row in ROWS
        for check in CHECKS
    ]


@pytest.mark.parametrize(("row", "check"), cases())
def test_a_family(row, check):
    if check == "shifts" and not claims_shifts(row):
        assert not shifts_are_allowed(row)  # neither claimed nor given
        return
    CHECKS[check](row)


def test_no_family_is_forgotten():
    """Each causal family of transformers is served, refused with its reason, or known not to have been looked at."""
    assert not set(FAMILIES) & set(REFUSED)
    assert len(REFUSED) == sum(map(len, REASONS.values()))  # one reason each
    assert set(REFUSED) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
