"""Families with recurrent layers against stock transformers: all of them with ``make test-families``."""

from __future__ import annotations

import pytest

from inlay import AsyncLLM, Schema
from inlay.models.families import FAMILIES
from tests.model.families.configs import RECURRENT, tiny
from tests.model.families.recurrent import CHECKS, SCHEMA
from tests.server.server.conftest import running

#: One of each operation: gated delta rule, Mamba-2, convolutions alone, Mamba, Kimi's delta attention.
SHORT = ("qwen3_5_text", "granitemoehybrid", "lfm2", "mamba", "kimi_linear")
SHORT_CHECKS = ("prefixes", "batches", "preemption", "modules")


def cases() -> list[object]:
    """Every family with every check; slow where it is not of the short form."""
    return [
        pytest.param(name, check, marks=() if name in SHORT and check in SHORT_CHECKS else pytest.mark.slow)
        for name in sorted(RECURRENT)
        for check in CHECKS
    ]


@pytest.mark.parametrize(("name", "check"), cases())
def test_a_recurrent_family(name, check):
    CHECKS[check](name)


def test_a_server_answers_a_schema_under_exact_and_refuses_modules():
    llm = AsyncLLM(tiny("qwen3_5_text"), seed=0, kv_memory="16MiB")
    with running(llm, [Schema.from_string(SCHEMA)]) as site:
        body = {"pml": '<prompt schema="trip"><hills/><user>Where to?</user></prompt>', "max_tokens": 2}
        first, second = (site.post("/v1/completions", **body) for _ in range(2))
        assert first["inlay"]["reuse"] == second["inlay"]["reuse"] == "exact"
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
        status, error = site.refusal("/v1/completions", body | {"reuse": "modular"})
        assert (status, error["code"]) == (403, "reuse_not_allowed")


def test_every_recurrent_family_has_a_tiny_model():
    recurrent = {kind for kind, family in FAMILIES.items() if hasattr(family.otherwise or family, "attending")}
    assert set(RECURRENT) == recurrent
