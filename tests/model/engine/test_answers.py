"""Several answers to one prompt, and answers that end in an error while the others go on."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count, pairwise

import pytest

from inlay import LLM, CapacityError, InlayError, ParameterError, SamplingParams, Schema
from inlay.attention.plan import Part
from inlay.engine.forward import StepObserver
from inlay.engine.request import Request
from inlay.sampling.sampler import request_seed
from tests.conftest import tiny
from tests.model.engine.observing import observed
from tests.model.hooks import each_pass
from tests.raising import raises

SCHEMA = Schema.from_string('<schema name="s">In front. <module name="a">The first module.</module></schema>')
PARAMS = SamplingParams(n=3, seed=5, max_tokens=12, temperature=0.8, logprobs=1)


@pytest.fixture
def llm() -> LLM:
    # Tests count passes, and with drafts the number of passes depends on measured times.
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0, chunk_size=4, speculation="off")


def prompt():
    return SCHEMA.prompt().use("a").text("Well?")


def alone(llm: LLM, question, params: SamplingParams) -> list[tuple[str, tuple[int, ...], float | None]]:
    """The answers of as many separate requests, with the seeds that ``n`` derives."""
    seeds = [request_seed(params, 0, 0, answer) for answer in range(params.n)]
    outputs = [llm.generate(question, replace(params, n=1, seed=seed))[0].outputs[0] for seed in seeds]
    return [(one.text, one.token_ids, pytest.approx(one.cumulative_logprob, abs=1e-3)) for one in outputs]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("question", ["Tell me something.", "x"])
@pytest.mark.parametrize("budget", [4096, 5])
def test_answers_equal_separate_requests(name, question, budget):
    llm = LLM(tiny(name), kv_memory="16MiB", chunk_size=4, max_num_batched_tokens=budget)
    (output,) = llm.generate(question, PARAMS)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({one.token_ids for one in output.outputs}) == 3
    found = [(one.text, one.token_ids, one.cumulative_logprob) for one in output.outputs]
    assert found == alone(llm, question, PARAMS)


def test_a_prompt_of_modules_has_several_answers(llm):
    llm.add_schema(SCHEMA)
    (output,) = llm.generate(prompt(), PARAMS)
    assert [(o.text, o.token_ids, o.cumulative_logprob) for o in output.outputs] == alone(llm, prompt(), PARAMS)
    assert (output.usage.cached_tokens, output.usage.computed_tokens) == (27, 5)


def test_the_prompt_is_computed_once(llm):
    passes = observed(llm).lengths
    llm.generate("Tell me something.", replace(PARAMS, n=5, max_tokens=2, ignore_eos=True))
    # The others wait one pass for the first one's tokens. Each then recomputes the last token, for its logits.
    assert passes == [[18], [1] * 5, [1] * 4]


class Plans(StepObserver):
    """The parts of every pass."""

    def __init__(self) -> None:
        self.parts: list[list[Part]] = []

    def computed(self, made, logits, running, seconds):
        self.parts.append([work.part for work in made.work])


def test_answers_share_the_slots_of_the_prompt(llm):
    plans = Plans()
    llm.observe(plans)
    llm.generate("Tell me something.", replace(PARAMS, max_tokens=3, ignore_eos=True))
    read = [{slot for run in part.ranges for slot in range(run.first, run.end)} for part in plans.parts[-1]]
    assert len(set.intersection(*read)) == 17


@pytest.mark.parametrize("places", [1, 2])
def test_answers_beyond_max_num_seqs_run_in_turn(places):
    llm = LLM(tiny("llama"), kv_memory="16MiB", chunk_size=4, max_num_seqs=places)
    free = llm.store.pool.free_chunks
    (output,) = llm.generate("Tell me something.", PARAMS)
    assert [(o.text, o.token_ids, o.cumulative_logprob) for o in output.outputs] == alone(
        llm, "Tell me something.", PARAMS
    )
    llm.store.clear()
    assert llm.store.pool.free_chunks == free


def test_answers_wait_for_memory_and_release_it(llm):
    params = replace(PARAMS, n=4, max_tokens=30, ignore_eos=True)
    expected = [one.token_ids for one in llm.generate("Tell me something.", params)[0].outputs]
    # The prompt's chunks, and room for one answer more than them.
    chunks = llm.store.pool.chunks_for(18) + llm.store.pool.chunks_for(31)
    small = LLM(tiny("llama"), kv_memory=chunks * 4 * llm.store.pool.bytes_per_token, chunk_size=4, seed=0)
    assert [one.token_ids for one in small.generate("Tell me something.", params)[0].outputs] == expected
    with pytest.raises(CapacityError):
        small.generate("Tell me something.", replace(params, max_tokens=60))
    small.store.clear()
    assert small.store.pool.free_chunks == small.store.pool.chunks == chunks


def test_every_chunk_is_released(llm):
    free = llm.store.pool.free_chunks
    llm.add_schema(SCHEMA)
    llm.generate([prompt(), "x", prompt()], [PARAMS, replace(PARAMS, n=2, max_tokens=1), replace(PARAMS, n=1)])
    stream = llm.stream(prompt(), PARAMS)
    next(stream)
    stream.close()
    llm.store.clear()
    assert llm.store.pool.free_chunks == free
    assert not llm.stats().busy


def test_all_answers_are_streamed_together(llm):
    steps = list(llm.stream("Tell me something.", PARAMS))
    assert all(len(step.outputs) == 3 for step in steps)
    for index in range(3):
        texts = [step.outputs[index].text for step in steps]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    (whole,) = llm.generate("Tell me something.", PARAMS)
    for streamed, answer in zip(steps[-1].outputs, whole.outputs, strict=True):
        assert (streamed.token_ids, streamed.text) == (answer.token_ids, answer.text)
        assert streamed.cumulative_logprob == pytest.approx(answer.cumulative_logprob, abs=1e-3)
    assert steps[-1].metrics.total_s >= steps[-1].metrics.ttft_s > 0


def test_default_seed_differs_between_requests(llm):
    params = replace(PARAMS, seed=None)
    first, second = llm.generate(["Well?"] * 2, params)
    assert len({one.token_ids for output in (first, second) for one in output.outputs}) == 6


def test_stop_strings_end_each_answer_independently(llm):
    params = replace(PARAMS, n=8, max_tokens=40, logprobs=None)
    whole = llm.generate("Tell me something.", params)[0].outputs
    stop = next(char for char in whole[0].text if char in whole[1].text)
    cut = llm.generate("Tell me something.", replace(params, stop=stop))[0].outputs
    for one, other in zip(cut, whole, strict=True):
        assert one.text == other.text.split(stop)[0]
        assert one.stop_reason == (stop if stop in other.text else other.stop_reason)


def damaged(llm: LLM, place: int, value: float, in_pass: int) -> AbstractContextManager[None]:
    """Put a value into one row of the logits, in one pass of the block."""
    passes = count()

    def damage(logits):
        if next(passes) == in_pass:
            logits[place, 7] = value

    return each_pass(llm.loaded, after=damage)


def prepared(llm: LLM, prompt: str, params: SamplingParams) -> Request:
    return llm.local.prepare(llm.processor.process(prompt, params, llm.policy()))


def run(llm: LLM, requests: list[Request]) -> None:
    """Run them to their end; raises what ended one of them."""
    for request in requests:
        llm.client.submit(request, lambda _: None)
    while llm.stats().busy:
        llm.client.pump()
    for request in requests:
        if request.failure is not None:
            raise request.failure


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("step", [0, 3])
def test_invalid_logits_end_only_one_request(llm, value, step):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = [one.outputs[0].token_ids for one in llm.generate(["One", "Two", "Three"], params)]
    llm.store.clear()
    free = llm.store.pool.free_chunks
    requests = [prepared(llm, prompt, params) for prompt in ("One", "Two", "Three")]
    held = "NaN" if math.isnan(value) else "+inf"
    with damaged(llm, 1, value, step), pytest.raises(InlayError) as caught:
        run(llm, requests)
    assert str(caught.value) == (
        f"request {requests[1].id}: the logits of token {step + 1} of the answer hold {held}; "
        "the model's weights or inputs are damaged"
    )
    assert [request.error is None for request in requests] == [True, False, True]
    assert [tuple(request.token_ids) for request in requests] == [expected[0], expected[1][:step], expected[2]]
    assert not any(segment.run.ids[-1] == requests[1].ids[-1] for segment in llm.store), "damaged states were kept"
    llm.store.clear()
    assert llm.store.pool.free_chunks == free
    assert not llm.stats().busy


def test_invalid_logits_end_only_one_answer(llm):
    expected = [one.token_ids for one in llm.generate("Tell me.", replace(PARAMS, ignore_eos=True))[0].outputs]
    leader = prepared(llm, "Tell me.", replace(PARAMS, ignore_eos=True))
    with damaged(llm, 0, math.nan, 0), raises("model.invalid_numbers"):
        run(llm, [leader])
    assert [tuple(member.token_ids) for member in leader.family] == [(), *expected[1:]]


def test_unknown_tokens_are_rejected(llm):
    for changes in ({"logit_bias": {262: 1.0}}, {"stop_token_ids": [3, 262]}):
        with pytest.raises(ParameterError) as caught:
            llm.generate("x", SamplingParams(**changes))
        assert str(caught.value) == f"{next(iter(changes))} holds token 262, and the model knows tokens 0 to 261"


def test_penalties_and_biases_reach_the_engine(llm):
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (once,) = llm.generate("Tell me", replace(plain, presence_penalty=2, frequency_penalty=2, repetition_penalty=50.0))
    said = once.outputs[0].token_ids
    assert len(set(said)) == len(said)
    assert not set(said) & set(once.prompt_token_ids)
    (biased,) = llm.generate("Tell me", replace(plain, logit_bias={65: 100}))
    assert biased.outputs[0].token_ids == (65,) * 12
