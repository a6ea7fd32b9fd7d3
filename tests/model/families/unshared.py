"""The requirements on models that are served without reuse, as functions that a test or the survey calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from inlay import LLM, ParameterError, SamplingParams, Schema
from inlay.models.load import LoadedModel
from inlay.models.shapes import bytes_tokenizer
from inlay.models.unshared import Unshared
from inlay.models.weights import STOCK, prepare
from tests.model.equivalence.recorder import Recorder
from tests.model.families.configs import stock_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCHEMA = (
    '<schema name="trip"><system>Plan a trip.</system><user><module name="sea">The sea is warm in May.</module>'
    '<module name="hills">The hills are dry in May.</module></user></schema>'
)


@cache
def tiny_unshared(name: str) -> LoadedModel:
    """The tiny model in fp32 with one token a byte, served without reuse; the same object at every call."""
    model = stock_model(name)
    spec = Unshared(name).spec(model)
    return LoadedModel(f"tiny-{name}", model, bytes_tokenizer(), spec, prepare(model, STOCK))


def _ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def _whole(name: str, ids: list[int]) -> Tensor:
    """The stock model's logits of a text that it sees whole, without a cache: (tokens, vocabulary)."""
    return tiny_unshared(name).model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def _equal(name: str, prompt: list[int], output, logits: Tensor) -> None:
    """Logits are the stock model's, within 5e-3 of their spread: pieces add states up in another order."""
    answer = list(output.outputs[0].token_ids)
    expected = _whole(name, prompt + answer[:-1])[len(prompt) - 1 :]
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    off = (logits.float() - expected).norm(dim=-1) / spread
    assert off.max() < 5e-3, (name, off)


def together(name: str) -> None:
    """A ragged batch, prompts in chunks of 16 tokens which cut through each other."""
    prompts = [_ids(length, seed) for seed, length in enumerate((1, 17, 61, 40))]
    recorder = Recorder(tiny_unshared(name), max_num_batched_tokens=16, prefill_chunk=16)
    for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts, 8), strict=True):
        _equal(name, prompt, output, logits)
        assert output.usage.cached_tokens == 0


def out_of_room(name: str) -> None:
    """Requests that are preempted, as the pool holds not all of them to their ends, answer as if alone."""
    llm = LLM(tiny_unshared(name), seed=0)
    shape = llm.client.engine.runner.shape
    prompts = [_ids(30, seed) for seed in range(3)]
    alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert llm.generate([prompts[0]] * 2, GREEDY)[1].outputs[0].token_ids == alone[0]
    if shape.bytes_per_token:
        room = 2 * 3 * shape.state_bytes + 7 * 16 * shape.bytes_per_token
        scarce = LLM(tiny_unshared(name), seed=0, kv_memory=room, chunk_size=16, max_num_seqs=3)
        scarce_prompts = [prompt + _ids(16, 9) for prompt in prompts]
        wanted = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in scarce_prompts]
        assert [one.outputs[0].token_ids for one in scarce.generate(scarce_prompts, GREEDY)] == wanted
        assert scarce.stats().preemptions or shape.state_bytes  # which leave more room than these prompts fill


def schemas(name: str) -> None:
    """A schema's prompt is plain text; policies that would read stored states are refused with the reason."""
    llm = LLM(tiny_unshared(name), seed=0)
    schema = Schema.from_string(SCHEMA)
    llm.add_schema(schema)
    prompt = schema.prompt().use("hills").text("Where to?")
    (output,) = llm.generate([prompt], GREEDY)
    ids = list(output.prompt_token_ids)
    assert (output.usage.cached_tokens, llm.stats().encoded_tokens, llm.stats().segments) == (0, 0, 0)
    assert llm.generate([ids], GREEDY)[0].outputs[0].token_ids == output.outputs[0].token_ids
    for asked in ({"reuse": "modular"}, {"reuse": "exact"}, {"positions": "schema"}):
        with pytest.raises(ParameterError, match=f"models of type '{llm.loaded.spec.family}' are served without reuse"):
            llm.generate([prompt], GREEDY, **asked)


CHECKS: dict[str, Callable[[str], None]] = {
    "together": together,
    "out of room": out_of_room,
    "schemas": schemas,
}
