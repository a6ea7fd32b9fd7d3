"""The load-time probe allows shifts where they hold, and refuses them where they do not."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from inlay import LLM, ParameterError, Schema
from inlay.attention.rope import Rotary
from inlay.models.load import LoadedModel
from tests.conftest import tiny


def test_rotary_models_pass(rotary_model):
    assert LLM(rotary_model, kv_memory="16MiB").positions_for("isolated") == "packed"


def test_learned_positions_allow_no_shift():
    llm = LLM(tiny("gpt2"), kv_memory="16MiB")
    assert llm.positions_for("anchored") == "schema"
    assert llm.positions_for("exact") == llm.positions_for("off") == "packed"
    with pytest.raises(ParameterError, match=r"gpt2 has learned positions, so a .* where it was encoded; use"):
        llm.positions_for("isolated", "packed")


def mistaken() -> LoadedModel:
    """Frequencies that are not the model's own: a shift would read keys from the wrong distance."""
    loaded = tiny("llama")
    wrong = Rotary(loaded.spec.layers[0].rotary.inverse_frequencies * 1.5)
    layers = tuple(replace(layer, rotary=wrong) for layer in loaded.spec.layers)
    return replace(loaded, spec=replace(loaded.spec, layers=layers))


def test_model_with_wrong_rotary_code_is_detected():
    llm = LLM(mistaken(), kv_memory="16MiB")
    assert llm.positions_for("isolated") == "schema"
    with pytest.raises(ParameterError, match="a shifted segment changes this model's logits by"):
        llm.positions_for("isolated", "packed")


def test_without_shifts_segments_are_keyed_by_position():
    llm = LLM(mistaken(), kv_memory="16MiB", reuse="isolated")
    schema = Schema.from_string(
        '<schema name="s"><module name="a">the same</module><module name="b">the same</module></schema>'
    )
    llm.add_schema(schema)
    assert len(llm.store) == 2  # the start is part of the key
    other = LLM(tiny("llama"), kv_memory="16MiB", reuse="isolated")
    other.add_schema(copy.copy(schema))
    assert len(other.store) == 1  # the same text is found again at any position
