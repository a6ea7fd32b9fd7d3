"""Whole tiny models through Triton's kernels, in the interpreter, against the stock models."""

from __future__ import annotations

import pytest
import torch

from inlay import LLM, SamplingParams, Schema
from tests.conftest import CONFIGS, tiny
from tests.model.attention.triton.cases import interpreted
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_exact import check_whole_answer, ids
from tests.model.equivalence.test_modules import SCHEMA, oracle_logits

pytestmark = [interpreted, pytest.mark.long]

TRIP = Schema.from_string(SCHEMA)


def check_answers(name: str, lengths: tuple[int, ...], tokens: int) -> None:
    """A batch of prompts in chunks, without reuse and then with it."""
    loaded = tiny(name)
    prompts = [ids(length, seed) for seed, length in enumerate(lengths)]
    for reuse in ("off", "exact", "exact"):
        recorder = Recorder(loaded, attention_backend="triton", max_num_batched_tokens=24, reuse=reuse)
        answers = recorder.greedy(prompts, tokens)
        for prompt, (output, logits) in zip(prompts, answers, strict=True):
            check_whole_answer(loaded, prompt, output, logits)


def check_modules(name: str, positions: str) -> None:
    """Prompts that share modules at different positions, in one batch."""
    loaded = tiny(name)
    recorder = Recorder(loaded, attention_backend="triton", reuse="anchored", positions=positions)
    recorder.llm.add_schema(TRIP)
    prompts = [
        TRIP.prompt().use("money").use("food").text("Where to?"),
        TRIP.prompt().use("trip", days="3 days", likes="tea").use("food").text("Where to?"),
    ]
    for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts, 4), strict=True):
        answer = list(output.outputs[0].token_ids)
        expected = oracle_logits(loaded, recorder.llm, prompt, answer, "anchored", positions)
        close(logits, torch.stack(expected))


def test_logits_equal_the_stock_model():
    check_answers("llama", (17, 5), 3)


def test_modules_at_any_position_equal_prompt_cache():
    check_modules("llama", "packed")


def test_batched_answers_equal_single_answers():
    params = SamplingParams(temperature=0, max_tokens=4)
    prompts = ["One two three", "One two four", "Five"]
    together = LLM(tiny("llama"), kv_memory="4MiB", attention_backend="triton").generate(prompts, params)
    alone = LLM(tiny("llama"), kv_memory="4MiB").generate(prompts, params)
    assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in alone]


@pytest.mark.triton
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_of_every_family(name):
    check_answers(name, (1, 15, 40), 4)


@pytest.mark.triton
@pytest.mark.parametrize("positions", ["schema", "packed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-mixed", "qwen3", "yarn"])
def test_modules_of_every_family(name, positions):
    check_modules(name, positions)


@pytest.mark.triton
def test_modules_survive_a_round_trip_to_disk(tmp_path):
    """Memory of a device is copied out and in by the store's threads."""
    loaded, params = tiny("llama"), SamplingParams(temperature=0, max_tokens=3)
    prompt = TRIP.prompt().use("money").use("food").text("Where to?")
    answers = []
    for computed in (True, False):
        llm = LLM(loaded, kv_memory="4MiB", attention_backend="triton", store=tmp_path / "store")
        llm.add_schema(TRIP)
        (output,) = llm.generate([prompt], params)
        answers.append(output.outputs[0].token_ids)
        assert (llm.stats().encoded_tokens > 0) is computed
        assert (llm.stats().disk_tokens > 0) is not computed
        llm.shutdown()
    assert answers[0] == answers[1]
