"""Distributions of given continuations: those of the stock model without reuse, and those of ``generate`` with it."""

from __future__ import annotations

import pytest
import torch

from inlay import LLM, ContextError, ParameterError, SamplingParams, Schema
from tests.conftest import tiny
from tests.model.equivalence.oracle import prefill
from tests.model.equivalence.recorder import close

SCHEMA = Schema.from_string(
    '<schema name="s">Always here.<module name="a">The first of the modules.</module>'
    '<module name="b">A second one, a little longer.</module><module name="c">The third.</module></schema>'
)
PROMPTS = [
    SCHEMA.prompt().use("a").use("c").text("And what now?"),
    SCHEMA.prompt().use("b").text("And then?"),
]


def make(name: str, **settings) -> LLM:
    return LLM(tiny(name), kv_memory="64MiB", chunk_size=16, **settings)


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_distributions_without_reuse_equal_the_stock_model(any_model):
    llm = LLM(any_model, kv_memory="64MiB", reuse="off", max_num_batched_tokens=40)
    prompts, continuations = [ids(50, 0), ids(1, 1), ids(20, 2)], [ids(9, 3), ids(17, 4), ids(1, 5)]
    for prompt, said, found in zip(prompts, continuations, llm.distributions(prompts, continuations), strict=True):
        assert found.dtype == torch.float32
        expected = prefill(any_model, prompt + said[:-1])[len(prompt) - 1 :].log_softmax(-1)
        close(found, expected)


@pytest.mark.parametrize("reuse", ["off", "exact", "isolated", "anchored"])
@pytest.mark.parametrize("positions", ["packed", "schema"])
def test_distributions_with_reuse_equal_reported_logprobs(reuse, positions):
    llm = make("qwen3", reuse=reuse, positions=positions)
    llm.add_schema(SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
    outputs = llm.generate(PROMPTS, params)
    said = [output.outputs[0].token_ids for output in outputs]
    for output, found in zip(outputs, llm.distributions(PROMPTS, said), strict=True):
        reported = output.outputs[0].logprobs
        assert found.shape == (12, llm.vocab_size)
        for row, step in zip(found, reported, strict=True):
            assert set(row.topk(5).indices.tolist()) == set(step)
            for token, logprob in step.items():
                assert float(row[token]) == pytest.approx(logprob.logprob, abs=1e-5)


def test_forced_tokens_may_contain_end_of_sequence():
    """End-of-sequence does not end a given continuation; a longer one starts with the results of the shorter one."""
    llm = make("llama", reuse="isolated")
    llm.add_schema(SCHEMA)
    end = llm.tokenizer.eos_token_id
    long, short = [end, 7, end, 200, 3], [end, 7]
    (whole,) = llm.distributions(PROMPTS[:1], [long])
    (part,) = llm.distributions(PROMPTS[:1], [short])
    assert whole.shape[0] == 5
    close(whole[:2], part)
    assert not torch.allclose(whole[1], whole[2], atol=1e-3)


def test_reuse_can_be_set_per_call():
    llm = make("llama")
    llm.add_schema(SCHEMA, encode=False)
    said = [[1, 2], [3]]
    off = llm.distributions(PROMPTS, said, reuse="off")
    isolated = llm.distributions(PROMPTS, said, reuse="isolated", positions="schema")
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(off, isolated, strict=True))


def test_concurrent_answers_are_not_affected():
    """A step may hold given and sampled answers."""
    llm = make("llama", reuse="off")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = llm.generate([ids(10, 0)], params)[0].outputs[0].token_ids
    stream = llm.stream(ids(10, 0), params)
    next(stream)
    llm.distributions([ids(30, 1)], [ids(20, 2)])
    assert list(stream)[-1].outputs[0].token_ids == alone


@pytest.mark.parametrize(
    ("prompts", "continuations", "error", "sentence"),
    [
        ("text", [[1]], ParameterError, "takes a list of prompts"),
        ([[1, 2], [3]], [[1]], ParameterError, "one for each"),
        ([[1, 2]], [[]], ParameterError, "a continuation is empty"),
        ([[1, 2]], [[262]], ParameterError, "a continuation holds the token id 262; ids go from 0 to 261"),
        ([[1, 2000]], [[1]], ParameterError, "a prompt holds the token id 2000"),
        ([[1] * 2040], [[1] * 10], ContextError, "continuation of 10 are 2 too long for the model's context"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_runs(prompts, continuations, error, sentence):
    llm = make("llama")
    with pytest.raises(error) as caught:
        llm.distributions(prompts, continuations)
    assert sentence in str(caught.value)
    assert not llm.stats().busy
