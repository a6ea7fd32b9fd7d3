"""When a layer's few rows go to the kernel, and the waits around it. These tests stand in for the kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from inlay.models.few_rows import FewRows
from inlay.models.interface import PassContext
from tests.model.models.prepared import prepared


@pytest.fixture(scope="module")
def loaded():
    return prepared("llama", dtype=torch.bfloat16)


def rows_and_tables():
    """Three rows of tiny-llama, (1, rows, width), and their cosines and sines, (1, rows, head_dim)."""
    return torch.zeros(1, 3, 32, dtype=torch.bfloat16), torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)


def test_kernel_waits_for_the_keys_of_the_layer(loaded):
    """Keys may still be on their way into the pool when the pass begins."""
    log = []
    steps = SimpleNamespace(run=lambda *_: log.append("kernel"))
    backend = SimpleNamespace(stored=lambda pool, plan, layer, *_: log.append(("addresses", layer)) or ())
    context = PassContext(backend, None, None, loaded.spec, await_layer=lambda layer: log.append(("wait", layer)))
    for number in (0, 1):
        FewRows(loaded.model.model.layers[number], steps, []).at_once(*rows_and_tables(), context)
    assert log == [(step, i) if step != "kernel" else step for i in (0, 1) for step in ("wait", "addresses", "kernel")]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_layer_with_a_cache_skips_the_kernel(loaded, name):
    """transformers 5.24 calls the cache ``cache``; earlier releases call it ``past_key_values``."""
    few_rows = FewRows(loaded.model.model.layers[0], None, [])
    rows, *tables = rows_and_tables()
    assert few_rows.fits(rows, position_embeddings=tables)
    assert not few_rows.fits(rows, position_embeddings=tables, **{name: DynamicCache()})
