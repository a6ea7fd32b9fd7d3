"""Which layers go to the kernel. These tests need no kernel for the weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from inlay import LLM, SamplingParams
from inlay.attention.kernel import kernel
from inlay.models import linear
from inlay.models.few_rows import FewRows, awake, most_rows_awake
from inlay.models.interface import EndOfPassError
from inlay.models.weights import WeightForm, prepare
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


@pytest.fixture
def multiplied(monkeypatch):
    """The kernel takes all weights, as it does where it is the fastest."""
    monkeypatch.setattr(linear, "can_multiply", lambda weight: True)


def packed_family(name):
    """A tiny model of a family, with its weights packed."""
    loaded = family(name)
    model = copy.deepcopy(loaded.model)
    return replace(loaded, model=model, fingerprint=prepare(model, WeightForm()), form=WeightForm())


@needs_crew
def test_threads_stay_awake_only_where_the_kernel_multiplies(monkeypatch, multiplied):
    with computing(2):
        widest = 2 * prepared("llama").model.config.intermediate_size
        assert most_rows_awake(prepared("llama").model) == 2**19 // (2 * widest)
        monkeypatch.setattr("inlay.models.few_rows.LARGE", 1000)
        assert most_rows_awake(prepared("llama").model) > 0, "the kernel holds its large weights"
        experts = packed_family("granitemoe").model
        assert most_rows_awake(experts) == 0
        for module in experts.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.dim() == 3:  # the experts
                    setattr(module, name, torch.nn.Parameter(weight[:0]))
        assert most_rows_awake(experts) > 0
        monkeypatch.setattr(linear, "can_multiply", lambda weight: False)
        assert most_rows_awake(prepared("llama").model) == 0


@needs_crew
def test_logits_that_pytorch_changes_count_as_a_step(multiplied):
    model = packed_family("gemma2").model
    assert model.config.final_logit_softcapping
    with computing(1):
        capped = most_rows_awake(model)
        model.config.final_logit_softcapping = None
        assert 0 < capped < most_rows_awake(model)


@needs_crew
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid", "gemma3_text"])
def test_short_passes_of_python_layers_keep_threads_awake_and_say_the_same(name, monkeypatch, multiplied):
    loaded, calls, run = packed_family(name), [], kernel.run_awake
    monkeypatch.setattr(kernel, "run_awake", lambda threads, work: (calls.append(threads), run(threads, work))[1])
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    said = []
    with computing(2):
        for most in (8, 0):
            monkeypatch.setattr("inlay.engine.runner.most_rows_awake", lambda model, most=most: most)
            llm = LLM(loaded, kv_memory="16MiB", reuse="off", speculation="off")
            calls.clear()
            output = llm.generate([list(range(1, 30))], params)[0].outputs[0]
            said.append((output.token_ids, output.logprobs))
            assert calls == [2] * (4 if most else 0), "not the pass over the prompt, which has more rows"
    assert said[0] == said[1]


@needs_crew
def test_passes_that_end_early_leave_the_engine_in_order(multiplied, monkeypatch):
    """Prompt rows without logits end a pass with an exception, here with threads awake."""
    ended, run = [], kernel.run_awake

    def noted(threads, work):
        try:
            run(threads, work)
        except EndOfPassError:
            ended.append(threads)
            raise

    monkeypatch.setattr(kernel, "run_awake", noted)
    monkeypatch.setattr("inlay.engine.runner.most_rows_awake", lambda model: 64)
    loaded, params = packed_family("gemma3_text"), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(1, 60))
    with computing(2):
        whole = LLM(loaded, kv_memory="16MiB", reuse="off", speculation="off").generate([prompt], params)
        pieces = LLM(loaded, kv_memory="16MiB", reuse="off", speculation="off", max_num_batched_tokens=20)
        ended.clear()
        assert pieces.generate([prompt], params)[0].outputs[0].token_ids == whole[0].outputs[0].token_ids
    assert ended == [2, 2], "the first two of three pieces have no logits"
