"""Which layers go to the kernel. These tests need no kernel for the weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from inlay.models.few_rows import FewRows
from tests.model.models.prepared import prepared


@pytest.fixture(scope="module")
def loaded():
    return prepared("llama", dtype=torch.bfloat16)


def rows_and_tables():
    """Three rows of tiny-llama, (1, rows, width), and their cosines and sines, (1, rows, head_dim)."""
    return torch.zeros(1, 3, 32, dtype=torch.bfloat16), torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_layer_with_a_cache_skips_the_kernel(loaded, name):
    """transformers 5.24 calls the cache ``cache``; earlier releases call it ``past_key_values``."""
    layer = loaded.model.model.layers[0]
    few_rows = FewRows(layer, None, [layer.input_layernorm.weight])
    rows, *tables = rows_and_tables()
    assert few_rows.fits(rows, position_embeddings=tables)
    assert not few_rows.fits(rows.float(), position_embeddings=tables), "the layer is in bfloat16"
    assert not few_rows.fits(rows, position_embeddings=tables, **{name: DynamicCache()})
