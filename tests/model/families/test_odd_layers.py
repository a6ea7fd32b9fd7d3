"""Families with layers of odd shapes: layers that read the keys of others, chunks of positions, a temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from inlay import LLM, ContextError, SamplingParams
from inlay.attention.plan import Item, Part, build_plan, plan_of_rows
from inlay.models.families import check_config, describe, family_of
from inlay.models.families.recurrent import Recurrent
from inlay.models.family import note_of, positions_of
from inlay.models.load import LoadedModel
from inlay.models.random import bytes_tokenizer
from inlay.models.unshared import Unshared
from inlay.models.weights import STOCK, prepare
from inlay.slots import SlotRange
from tests.model.equivalence.recorder import Recorder, close
from tests.model.families.configs import LAYERS, stock_model, tiny, tiny_config
from tests.raising import raises

GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def _ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _loaded(row: str, **more: Any) -> tuple[LoadedModel, PreTrainedModel]:
    """A tiny model with further settings, and a stock copy of it."""
    model = stock_model(row, **more)
    key = prepare(model, STOCK)
    return LoadedModel(row, model, bytes_tokenizer(), describe(model), key), stock_model(row, **more)


@torch.inference_mode()
def _steps(stock: PreTrainedModel, prompt: list[int], output: Any) -> torch.Tensor:
    ids = prompt + list(output.outputs[0].token_ids)[:-1]
    return stock(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 :]


@pytest.mark.parametrize("row", ["gemma3n_text", "gemma4_text"])
def test_pool_has_no_memory_for_layers_without_keys(row):
    llm = LLM(tiny(row), kv_memory="16MiB")
    assert [each.shape[0] for each in llm.client.engine.runner.storage.keys] == [2] * (LAYERS - 2)
    assert llm.loaded.spec.sources == (0, 1, 0, 1)
    assert llm.loaded.spec.readers == 2


def test_only_rows_with_logits_pass_layers_without_keys():
    llm = LLM(tiny("gemma4_text"), kv_memory="16MiB", reuse="off", max_num_batched_tokens=16, prefill_chunk=16)
    before = llm.stats().rows_saved
    llm.generate([_ids(40)], GREEDY)  # chunks of 16, 16 and 8 rows, and one row with logits
    assert llm.stats().rows_saved - before == 2 * 39


def test_passes_without_logits_end_before_layers_without_keys():
    llm = LLM(tiny("gemma3n_text"), kv_memory="16MiB", reuse="off", max_num_batched_tokens=16, prefill_chunk=16)
    before = llm.stats().rows_saved
    llm.generate([_ids(40)], GREEDY)
    assert llm.stats().rows_saved - before == 2 * 32


def test_model_with_keys_in_all_layers_saves_no_rows():
    llm = LLM(tiny("gemma4_text dense"), kv_memory="16MiB", reuse="off")
    llm.generate([_ids(40)], GREEDY)
    assert llm.stats().rows_saved == 0


def test_prompt_logprobs_in_a_batch_equal_the_stock_model():
    """The rows of one request have logits beside the last rows of others, and in another order."""
    loaded, stock = _loaded("gemma4_text")
    prompts = [_ids(30, seed) for seed in range(3)]
    llm = LLM(loaded, kv_memory="16MiB", reuse="off")
    params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0 if i == 1 else None) for i in range(3)]
    outputs = llm.generate(prompts, params)
    assert llm.stats().rows_saved > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = stock(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        assert output.outputs[0].token_ids == (int(logits[-1].argmax()),)
        if output.prompt_logprobs is not None:
            found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
            expected = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            close(torch.tensor(found), expected)


@pytest.mark.parametrize("row", ["gemma3n_text", "gemma4_text"])
def test_reuse_with_chunks_of_a_prompt_equals_the_stock_model(row):
    recorder = Recorder(tiny(row), reuse="exact", max_num_batched_tokens=16, prefill_chunk=16)
    stock = stock_model(row)
    for end in (_ids(9, 1), _ids(9, 1), _ids(21, 2)):
        prompt = _ids(50) + end
        ((output, logits),) = recorder.greedy([prompt], 4)
        close(logits, _steps(stock, prompt, output))
    assert output.usage.cached_tokens >= 48


def test_a_plan_of_some_rows_reads_the_keys_of_all():
    context = [Item(SlotRange(100, 5), 0)]
    first, second = Part.of(5, 4, context, [SlotRange(10, 4)]), Part.of(0, 3, (), [SlotRange(20, 3)])
    plan = plan_of_rows(build_plan([first, second, first]), [1, 3, 5])
    assert plan.positions.tolist() == [6, 8, 1]
    assert plan.slots.tolist() == [11, 13, 21]
    assert [part.pairs for part in plan.parts] == [7 + 9, 2]


def test_a_bidirectional_model_is_refused():
    config = tiny_config("gemma4_text", use_bidirectional_attention="all")
    with raises("model.unsupported_setting"):
        check_config(config)


def test_batched_rows_keep_the_temperature_of_llama4():
    """Stock code counts rows where it needs positions, and 60 rows are beyond the first temperature."""
    loaded, stock = _loaded("llama4_text", floor_scale=24)
    prompts = [_ids(15, seed) for seed in range(4)]
    for prompt, (output, logits) in zip(prompts, Recorder(loaded, reuse="off").greedy(prompts, 4), strict=True):
        close(logits, _steps(stock, prompt, output))


@pytest.mark.parametrize(("settings", "positions"), [({"floor_scale": 24}, 23), ({"attention_chunk_size": 24}, 24)])
def test_llama4_answers_up_to_the_end_of_its_first_chunk_and_refuses_longer_texts_with_the_reason(settings, positions):
    loaded, stock = _loaded("llama4_text", **settings)
    assert loaded.spec.max_positions == positions
    assert f"{positions} tokens here, not 4,096" in (note_of(loaded.model.config) or "")
    recorder = Recorder(loaded, reuse="exact")
    prompt = _ids(positions - 3)
    ((output, logits),) = recorder.greedy([prompt], 3)
    close(logits, _steps(stock, prompt, output))
    with raises("request.too_long", ContextError) as caught:
        recorder.llm.generate([_ids(positions)])
    assert loaded.spec.limit in str(caught.value)


def test_llama4_of_the_usual_settings_has_8191_positions():
    config = tiny_config("llama4_text", max_position_embeddings=10_485_760)
    assert positions_of(config) == 8191
    assert positions_of(tiny_config("llama4_text", max_position_embeddings=10_485_760, floor_scale=9000)) == 8192


def test_granite_4_with_recurrent_layers_is_a_recurrent_family():
    assert not isinstance(family_of(tiny_config("granitemoehybrid attention")), Unshared)
    assert isinstance(family_of(tiny_config("granitemoehybrid")), Recurrent)
