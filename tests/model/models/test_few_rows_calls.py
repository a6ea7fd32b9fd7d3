"""Which passes and layers go to the kernel. These tests need no kernel for the weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from inlay.attention.cpu import CpuBackend
from inlay.models.few_rows import MOST_ROWS, FewRows, FewRowsPass
from inlay.models.interface import PassContext
from tests.model.models.prepared import prepared


@pytest.fixture(scope="module")
def loaded():
    return prepared("llama", dtype=torch.bfloat16)


def rows_and_tables():
    """Three rows of tiny-llama, (1, rows, width), and their cosines and sines, (1, rows, head_dim)."""
    return torch.zeros(1, 3, 32, dtype=torch.bfloat16), torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)


def test_pass_that_stops_or_waits_between_layers_is_no_whole_pass(loaded):
    """Keys may still be on their way into the pool when the pass begins."""
    backend = CpuBackend()
    pool = backend.make_pool(loaded.spec.shapes, torch.bfloat16, 64)
    layers = [FewRows(layer, None, []) for layer in loaded.model.model.layers]
    passes = FewRowsPass(loaded.model, layers, loaded.spec, backend, pool)
    plan = SimpleNamespace(rows=MOST_ROWS)
    plain = PassContext(backend, pool, plan, loaded.spec)
    assert passes.fits(plain)
    for other in ({"await_layer": id}, {"last_layer": 1}, {"watched": [()]}, {"kept": object()}):
        assert not passes.fits(replace(plain, **other))
    plan.rows += 1
    assert not passes.fits(plain)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_layer_with_a_cache_skips_the_kernel(loaded, name):
    """transformers 5.24 calls the cache ``cache``; earlier releases call it ``past_key_values``."""
    few_rows = FewRows(loaded.model.model.layers[0], None, [])
    rows, *tables = rows_and_tables()
    assert few_rows.fits(rows, position_embeddings=tables)
    assert not few_rows.fits(rows, position_embeddings=tables, **{name: DynamicCache()})
