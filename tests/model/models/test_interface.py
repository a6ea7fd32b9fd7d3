"""The interface to stock models: the choice of attention, and overlapping users of one model do not disturb each
other.
"""

from __future__ import annotations

from inlay.models.interface import IMPLEMENTATION, attention_implementation
from tests.conftest import tiny


def test_overlapping_blocks_restore_the_model():
    """Two engines over one model compute on threads of their own: neither block ends inside the other."""
    model = tiny("llama").model
    before = model.config._attn_implementation
    one, other = (attention_implementation(model, IMPLEMENTATION) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert model.config._attn_implementation == IMPLEMENTATION
    other.__exit__(None, None, None)
    assert model.config._attn_implementation == before


def test_nested_blocks_restore_the_model():
    model = tiny("llama").model
    before = model.config._attn_implementation
    with attention_implementation(model, IMPLEMENTATION):
        with attention_implementation(model, "eager"):
            assert model.config._attn_implementation == "eager"
        assert model.config._attn_implementation == IMPLEMENTATION
    assert model.config._attn_implementation == before
