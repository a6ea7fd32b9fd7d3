"""Embeddings of prompts equal the stock model's last hidden states, from the cache or not, and in any batch."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from inlay import LLM, ParameterError, SamplingParams
from inlay.events import TokenEvent, events_from_bytes, events_to_bytes
from tests.conftest import tiny
from tests.raising import raises

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 9, 10, 3], [4], list(range(3, 40))]


@cache
def llm(kind: str = "llama") -> LLM:
    return LLM(tiny(kind), kv_memory="16MiB", chunk_size=4, prefill_chunk=16, seed=0, reuse="exact")


def stock(kind: str, ids: list[int], pooling: str) -> np.ndarray:
    """The stock model's last hidden states, pooled."""
    model = llm(kind).loaded.model
    with torch.inference_mode():
        hidden = model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()


def embedded(kind: str, pooling: str, prompts: list[list[int]] = PROMPTS) -> list[np.ndarray]:
    outputs = llm(kind).generate(prompts, SamplingParams(max_tokens=0, pooling=pooling))
    assert all(output.outputs[0].token_ids == () or not output.outputs[0].token_ids for output in outputs)
    return [np.array(output.embedding, dtype=np.float32) for output in outputs]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_embedding_equals_the_stock_models_hidden_state(kind: str, pooling: str) -> None:
    for _ in range(2):  # the second time, prompts are in the cache
        for ids, found in zip(PROMPTS, embedded(kind, pooling), strict=True):
            np.testing.assert_allclose(found, stock(kind, ids, pooling), atol=1e-4)


def test_the_last_token_reads_the_cache_and_a_mean_does_not() -> None:
    ids = [list(range(50, 90))]
    for pooling, cached in (("last", 36), ("mean", 0)):
        llm().generate(ids, SamplingParams(max_tokens=0, pooling="last"))
        (output,) = llm().generate(ids, SamplingParams(max_tokens=0, pooling=pooling))
        assert output.usage.cached_tokens >= cached
        assert (output.usage.cached_tokens == 0) == (cached == 0)
        np.testing.assert_allclose(output.embedding, stock("llama", ids[0], pooling), atol=1e-4)


def test_answer_and_embedding_of_a_prompt_come_together() -> None:
    plain = llm().generate([PROMPTS[0]], SamplingParams(max_tokens=4, temperature=0))[0]
    both = llm().generate([PROMPTS[0]], SamplingParams(max_tokens=4, temperature=0, pooling="mean"))[0]
    assert both.outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.embedding is None
    np.testing.assert_allclose(both.embedding, stock("llama", PROMPTS[0], "mean"), atol=1e-4)


def test_requests_of_one_batch_do_not_affect_each_other() -> None:
    outputs = llm().generate(
        PROMPTS * 3,
        [
            SamplingParams(max_tokens=number % 3, pooling=("last", "mean")[number % 2], temperature=0)
            if number % 3 != 1 or number % 2
            else SamplingParams(max_tokens=2, prompt_logprobs=1, temperature=0)
            for number in range(len(PROMPTS) * 3)
        ],
    )
    for number, output in enumerate(outputs):
        if output.embedding is not None:
            expected = stock("llama", PROMPTS[number % len(PROMPTS)], ("last", "mean")[number % 2])
            np.testing.assert_allclose(output.embedding, expected, atol=1e-4)
    assert sum(output.embedding is not None for output in outputs) == 10
    assert sum(output.prompt_logprobs is not None for output in outputs) == 2


def test_an_event_carries_an_embedding() -> None:
    event = TokenEvent("a", 0, embedding=np.array([1, 2.5], dtype="<f4").tobytes())
    assert events_from_bytes(events_to_bytes([event])) == [event]


def test_wrong_parameters() -> None:
    with raises("parameter.out_of_range", ParameterError):
        SamplingParams(pooling="max")  # type: ignore[arg-type]
