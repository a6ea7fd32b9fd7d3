"""Log-probabilities of prompts, and requests for no token, against the stock model."""

from __future__ import annotations

import math

import pytest
import torch

import inlay.engine.request
from inlay import LLM, ContextError, ParameterError, Prompt, SamplingParams, Schema
from tests.conftest import tiny
from tests.model.engine.driving import Driver
from tests.model.equivalence.oracle import prefill
from tests.model.hooks import each_pass
from tests.raising import raises

IDS = [(7 * n) % 256 for n in range(40)]
SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">The first module.</module><module name="b">Another.</module></schema>'
)
NOTHING = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)


@pytest.fixture
def llm() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0, max_num_batched_tokens=16, prefill_chunk=16)


def expected(llm: LLM, ids, positions=None) -> torch.Tensor:
    """(tokens - 1, vocabulary): the stock model's log-probabilities after every token but the last."""
    return prefill(llm.loaded, list(ids), None if positions is None else list(positions))[:-1].log_softmax(-1)


def check(llm: LLM, output, top: int = 2) -> None:
    entries = output.prompt_logprobs
    truth = expected(llm, output.prompt_token_ids, output.prompt_positions)
    assert entries[0] is None
    assert len(entries) == len(output.prompt_token_ids)
    for token, entry, row in zip(output.prompt_token_ids[1:], entries[1:], truth, strict=True):
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        leaders = row.topk(top).indices.tolist()
        assert set(entry) == {token, *leaders}
        assert all(entry[other].logprob == pytest.approx(float(row[other]), abs=1e-4) for other in leaders)
        assert entry[token].decoded_token == llm.tokenizer.decode([token])


def test_a_prompt_over_several_passes_has_the_stock_models_log_probabilities(llm):
    (output,) = llm.generate([IDS], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2))
    check(llm, output)
    assert len(output.outputs[0].token_ids) == 3


def test_stored_prefix_is_recomputed_for_prompt_logprobs(llm):
    llm.generate([IDS], SamplingParams(temperature=0, max_tokens=1))
    (again,) = llm.generate([IDS], SamplingParams(temperature=0, max_tokens=1))
    (scored,) = llm.generate([IDS], NOTHING)
    assert again.usage.cached_tokens == len(IDS) - 1
    assert scored.usage.cached_tokens == 0
    check(llm, scored)


@pytest.mark.parametrize("positions", ["schema", "packed"])
def test_modules_are_computed_in_place(llm, positions):
    llm.add_schema(SCHEMA, positions=positions)
    prompt = Prompt.from_string('<prompt schema="s"><b/>What then?</prompt>')
    (output,) = llm.generate([prompt], NOTHING, reuse="anchored", positions=positions)
    check(llm, output)
    assert output.usage.module_tokens == 0


def test_requests_of_all_kinds_share_passes(llm):
    wanted = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [IDS, IDS[5:25], IDS[3:], IDS[:1]]
    outputs = llm.generate(prompts, [wanted, plain, NOTHING, wanted])
    alone = [llm.generate([prompt], plain)[0].outputs[0].token_ids for prompt in prompts]
    check(llm, outputs[0], top=0)
    check(llm, outputs[2])
    assert outputs[1].prompt_logprobs is None
    assert outputs[3].prompt_logprobs == [None]
    assert [outputs[n].outputs[0].token_ids for n in (0, 1, 3)] == [alone[n] for n in (0, 1, 3)]


def test_request_for_no_token_ends_after_its_prompt(llm):
    (output,) = llm.generate([IDS], NOTHING)
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "length")
    assert output.finished
    with raises("parameter.out_of_range", ParameterError, names="max_tokens"):
        SamplingParams(max_tokens=0)


def test_prompt_of_context_length_fits_without_an_answer(llm):
    ids = [1] * llm.loaded.spec.max_positions
    (output,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs[-1] is not None
    with raises("request.too_long", ContextError):
        llm.generate([ids], SamplingParams(max_tokens=1))


def test_several_answers_share_one_report(llm):
    (output,) = llm.generate([IDS], SamplingParams(n=3, seed=1, max_tokens=2, ignore_eos=True, prompt_logprobs=1))
    check(llm, output, top=1)
    assert len(output.outputs) == 3


@pytest.mark.parametrize("tokens", [0, 3])
def test_early_answer_does_not_truncate_prompt_logprobs(tokens):
    """Of two answers to a long prompt the second gets most of every pass, and has its first token before the first."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, max_num_batched_tokens=64, prefill_chunk=32)
    params = SamplingParams(n=2, seed=1, max_tokens=tokens, ignore_eos=True, prompt_logprobs=1)
    (output,) = llm.generate([(IDS * 8)[:300]], params)
    check(llm, output, top=1)
    assert [len(answer.token_ids) for answer in output.outputs] == [tokens, tokens]


def test_preempted_request_reports_the_same_logprobs():
    llm = LLM(tiny("llama"), kv_memory="64KiB", seed=0, chunk_size=8)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=1)
    outputs = llm.generate([IDS[:20], IDS[3:23], IDS[7:27]], params)
    assert llm.stats().preemptions > 0
    for output in outputs:
        check(llm, output, top=1)


def test_logits_of_a_pass_are_bounded(monkeypatch):
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    monkeypatch.setattr(inlay.engine.request, "PASS_LOGITS", 10 * llm.vocab_size)
    seen: list[int] = []
    with each_pass(llm.loaded, after=lambda logits: seen.append(len(logits))):
        (output,) = llm.generate([IDS], NOTHING)
        assert seen == [10, 10, 10, 9]
        seen.clear()
        llm.generate([IDS], SamplingParams(max_tokens=1))
    assert seen == [1]  # in one pass, once no request is scored
    check(llm, output)


def test_finished_report_does_not_slow_other_prompts(monkeypatch):
    driver = Driver(max_num_batched_tokens=64)
    monkeypatch.setattr(inlay.engine.request, "PASS_LOGITS", 8 * driver.llm.vocab_size)
    scored, other = driver.request(IDS, tokens=20, prompt_logprobs=0), driver.request(IDS[:30], tokens=1)
    driver.add(scored)
    while not scored.token_ids:
        driver.step()
    driver.add(other)
    driver.step()
    assert other.token_ids  # in one pass


def test_invalid_logits_end_one_request(llm):
    with each_pass(llm.loaded, after=lambda logits: logits * math.nan), raises("model.invalid_numbers"):
        llm.generate([IDS], NOTHING)
    check(llm, llm.generate([IDS], NOTHING)[0])
    assert llm.stats().running == llm.stats().held_chunks == 0


@pytest.mark.parametrize("value", [-1, 21, True, 1.5])
def test_invalid_number_of_alternatives_is_refused(value):
    with raises("parameter.out_of_range", ParameterError, names="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)
