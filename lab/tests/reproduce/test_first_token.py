"""Experiments on the first token: new tokens are computed in every run, even if the prompt repeats."""

from __future__ import annotations

import pytest

from inlay.client.llm import LLM
from inlay_lab.reproduce.applications import measure_applications
from inlay_lab.reproduce.first_token import measure_later_tokens

SETTINGS = {"model": "random:tiny", "runs": 3}


@pytest.fixture
def usages(monkeypatch):
    """The usage of all requests, in order."""
    found, generate = [], LLM.generate

    def noted(*asked, **more):
        outputs = generate(*asked, **more)
        found.extend(output.usage for output in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", noted)
    return found


def test_later_tokens(usages):
    measure_later_tokens({**SETTINGS, "cached": 64, "new": 8, "tokens": 3})
    found = {(usage.cached_tokens, usage.computed_tokens) for usage in usages}
    assert len(usages) == 8
    assert found == {(0, 72), (64, 8)}


def test_applications(usages):
    found = measure_applications({**SETTINGS, "tokens": 16})
    lines = [(int(line[1].replace(",", "")), int(line[2].replace(",", ""))) for line in found.tables[0].lines]
    assert len(usages) > 3 * len(lines)
    assert {(usage.cached_tokens, usage.computed_tokens) for usage in usages} == set(lines)
