"""Which layers go to the kernel. These tests need no kernel for the weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from inlay import LLM, SamplingParams
from inlay.attention.kernel import kernel
from inlay.models import linear
from inlay.models.few_rows import AWAKE_ROWS, FewRows, awake, stays_awake
from tests.model.families.configs import tiny as family
from tests.model.models.prepared import prepared
from tests.threads import computing


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


needs_crew = pytest.mark.skipif(not hasattr(kernel, "run_awake"), reason="no compiled kernel")


@needs_crew
def test_work_with_threads_awake_returns_and_raises_as_without():
    with computing(2):
        assert awake(lambda: awake(lambda: 3)) == 3
        with pytest.raises(KeyError, match="lost"):
            awake(lambda: {}["lost"])
        assert awake(lambda: torch.ones(3).sum()) == 3


@needs_crew
def test_threads_stay_awake_only_where_the_kernel_multiplies(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(linear, "can_multiply", lambda weight: True)
        assert stays_awake(prepared("llama").model)
        patch.setattr("inlay.models.few_rows._LARGE", 100)
        assert stays_awake(prepared("llama").model), "the kernel holds its large weights"
        assert not stays_awake(family("granitemoe").model), "experts are one parameter, multiplied by PyTorch"
    monkeypatch.setattr(linear, "can_multiply", lambda weight: False)
    assert not stays_awake(prepared("llama").model)


@needs_crew
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid", "gemma3_text"])
def test_short_passes_of_python_layers_keep_threads_awake_and_say_the_same(name, monkeypatch):
    loaded, calls = family(name), []
    run = kernel.run_awake
    monkeypatch.setattr(kernel, "run_awake", lambda threads, work: (calls.append(threads), run(threads, work))[1])
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    said = []
    for stays in (True, False):
        monkeypatch.setattr("inlay.engine.runner.stays_awake", lambda model, stays=stays: stays)
        llm = LLM(loaded, kv_memory="16MiB", reuse="off", speculation="off")
        calls.clear()
        output = llm.generate([list(range(1, AWAKE_ROWS + 9))], params)[0].outputs[0]
        said.append((output.token_ids, output.logprobs))
        assert len(calls) == (4 if stays else 0), "not the pass over the prompt, which has more rows"
    assert said[0] == said[1]
