"""Where drafts come from, and which answers get none."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.engine.pass_cost import RowCost
from inlay.engine.request import Request
from inlay.engine.speculator import MOST_ANSWERS, Draft, Speculator, StepTimes
from inlay.errors import ParameterError
from tests.conftest import tiny
from tests.model.engine.driving import Driver, ids, sample_on_device
from tests.model.engine.speculation.planted import FREE, Hopeful
from tests.model.families.configs import RECURRENT
from tests.model.families.configs import tiny as tiny_family
from tests.raising import raises

WORDS = "the captain of the seventh ship is called Adelaide"
MODULE = Schema.from_string(f'<schema name="m"><module name="a">Log: {WORDS}.</module></schema>')


class Noted(Speculator):
    """Keeps the drafts that it makes."""

    def __init__(self) -> None:
        super().__init__(FREE, Hopeful)
        self.made: list[Draft] = []

    def drafts(self, requests: Sequence[Request], rows: int, most: int) -> dict[Request, Draft]:
        found = super().drafts(requests, rows, most)
        self.made += found.values()
        return found


@pytest.fixture
def driver() -> Driver:
    made = Driver(speculation="lookup", record=False, chunk_size=16)
    assert made.engine.speculator is not None
    speculator = Noted()
    speculator.earlier = made.engine.speculator.earlier  # evictions forget answers there
    made.engine.speculator = speculator
    return made


def noted(driver: Driver) -> Noted:
    assert isinstance(driver.engine.speculator, Noted)
    return driver.engine.speculator


def first_draft(driver: Driver, prompt: Any, said: str, **given: Any) -> Draft | None:
    """The draft after the first tokens of an answer, which are set."""
    request = driver.request(prompt, 60, **given)
    driver.add(request)
    while not request.token_ids:
        driver.step()
    request.answer.token_ids[:] = driver.llm.encoder.text(said)
    assert driver.engine.speculator is not None
    found = driver.engine.speculator.drafts([request], 1, 100)
    driver.engine.release(request)
    return found.get(request)


def text_of(driver: Driver, draft: Draft | None) -> str:
    assert draft is not None
    return driver.llm.loaded.tokenizer.decode(list(draft.tokens))


def test_a_module_is_continued(driver):
    driver.schema(MODULE)
    draft = first_draft(driver, MODULE.prompt().use("a").text("Who?"), "It says: seventh", reuse="modular")
    assert text_of(driver, draft) == " ship is called "
    assert draft is not None
    assert draft.source == "module"


def test_text_of_the_request_is_continued(driver):
    draft = first_draft(driver, f"Say that {WORDS}.", "So: the capt")
    assert text_of(driver, draft) == "ain of the seven"
    assert draft is not None
    assert draft.source == "text"


def test_repetition_in_an_answer_is_drafted(driver):
    draft = first_draft(driver, "Count.", "one two one two one")
    assert text_of(driver, draft) == " two one two one"
    assert draft is not None
    assert draft.source == "text"


def test_the_longest_match_counts(driver):
    draft = first_draft(driver, "big red dog. one red cat.", "a big red")
    assert text_of(driver, draft).startswith(" dog")


def test_earlier_answer_is_drafted_under_its_salt_only(driver):
    tokens = driver.llm.encoder.text(f"Answer: {WORDS}.")
    noted(driver).earlier.add("a", tokens, frozenset())
    draft = first_draft(driver, "Well?", "The seventh", salt="a")
    assert text_of(driver, draft) == " ship is called "
    assert draft is not None
    assert draft.source == "answer"
    assert first_draft(driver, "Well?", "The seventh", salt="b") is None
    assert first_draft(driver, "Well?", "The seventh") is None


def test_finished_answers_are_kept_and_evicted_with_their_text(driver):
    request = driver.request(ids(9), 20, salt="a")
    driver.run(request)
    earlier = noted(driver).earlier
    assert earlier.tokens == 20
    driver.engine.evict_texts("b")
    assert earlier.tokens == 20
    driver.engine.evict_texts("a")
    assert earlier.tokens == 0


def test_answers_are_evicted_with_the_modules_of_their_prompt(driver):
    driver.schema(MODULE)
    request = driver.request(MODULE.prompt().use("a").text("Who?"), 20, reuse="modular")
    driver.run(request)
    assert noted(driver).earlier.tokens == 20
    specs = [spec for part in request.prompt.request.parts for spec in part.candidates]
    driver.engine.evict(specs)
    assert noted(driver).earlier.tokens == 0


def test_released_request_leaves_no_answer(driver):
    request = driver.request(ids(9), 20)
    driver.add(request)
    driver.step(5)
    driver.engine.release(request)
    assert noted(driver).earlier.tokens == 0


def test_an_answer_past_its_deadline_is_forgotten(driver):
    request = driver.request(ids(9), 60, deadline=time.perf_counter() + 0.05)
    driver.add(request)
    driver.step(5)
    time.sleep(0.06)
    driver.step()
    assert request.error is not None
    assert "deadline" in str(request.error)
    left = weakref.ref(request)
    del request
    gc.collect()
    assert left() is None
    assert noted(driver).earlier.tokens == 0


def test_a_draft_ends_where_the_grammar_does(driver):
    prompt = "abcabc-abcabd-abcabc"
    draft = first_draft(driver, prompt, "abc", structured_outputs={"regex": "[a-c]{9}"})
    assert draft is not None
    assert set(text_of(driver, draft)) <= set("abc")


def test_forced_answers_get_no_drafts(driver):
    request = driver.request("the same the same the same", forced="the same the same the same")
    driver.run(request)
    assert noted(driver).made == []
    assert request.answer.drafted == 0


def test_draft_leaves_one_token_to_generate(driver):
    request = driver.request("the same the same the same", 12)
    driver.run(request)
    assert len(request.token_ids) == 12
    assert all(len(draft.tokens) <= 10 for draft in noted(driver).made)


def test_answers_of_a_recurrent_model_get_no_drafts():
    llm = LLM(tiny_family(next(iter(RECURRENT))), kv_memory="16MiB", speculation="lookup")
    (output,) = llm.generate("the same the same the same", SamplingParams(temperature=0, max_tokens=20))
    assert output.usage.drafted_tokens == output.usage.accepted_tokens == 0
    assert llm.stats().drafted_tokens == ()


def test_usage_and_statistics_count_drafts():
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, speculation="lookup")
    llm.local.engine.speculator = Speculator(FREE)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = ["One prompt.", "Another one."]
    outputs = [output for _ in range(2) for output in llm.generate(prompts, params)]  # then answers are known
    drafted, accepted = dict(llm.stats().drafted_tokens), dict(llm.stats().accepted_tokens)
    assert sum(output.usage.drafted_tokens for output in outputs) == sum(drafted.values()) > 0
    assert sum(output.usage.accepted_tokens for output in outputs) == sum(accepted.values()) > 0
    assert accepted["answer"] > 60
    assert llm.stats().steps < 100, "accepted tokens save passes"


@pytest.mark.parametrize("more", [0, 1])
def test_a_large_batch_gets_no_drafts(more):
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, speculation="lookup")
    llm.local.engine.speculator = Speculator(FREE)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = ["One prompt."] * (MOST_ANSWERS + more)
    outputs = [output for _ in range(2) for output in llm.generate(prompts, params)]
    drafted = sum(output.usage.drafted_tokens for output in outputs)
    assert drafted == 0 if more else drafted > 0


def test_speculation_off_disables_drafts():
    llm = LLM(tiny("llama"), kv_memory="16MiB", speculation="off")
    (output,) = llm.generate("abcabcabc", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert output.usage.drafted_tokens == 0
    assert llm.stats().drafted_tokens == ()


def test_unknown_speculation_mode_is_rejected():
    with raises("parameter.unknown_choice", ParameterError, names="speculation"):
        LLM(tiny("llama"), speculation="yes")


def test_answers_on_a_device_are_equal(monkeypatch):
    """A step with a draft waits for the tokens of the one before it. Other steps are launched ahead."""
    params = [SamplingParams(temperature=0.7 * (number % 2), seed=number, max_tokens=40) for number in range(4)]
    prompts = [f"Prompt {number}: {'abc' * number}" for number in range(4)]

    def answers(way: str) -> tuple[list[tuple[int, ...]], LLM]:
        llm = LLM(tiny("llama"), kv_memory="16MiB", chunk_size=4, seed=0, speculation=way)
        if way == "lookup":
            llm.local.engine.speculator = Speculator(FREE)
        return [output.outputs[0].token_ids for _ in range(2) for output in llm.generate(prompts, params)], llm

    expected, _ = answers("off")
    sample_on_device(monkeypatch)
    found, llm = answers("lookup")
    assert found == expected
    assert sum(dict(llm.stats().accepted_tokens).values()) > 0


def test_running_answer_gets_no_drafts_from_an_evicted_answer(driver):
    answer = driver.llm.encoder.text("He said: the captain of the seventh ship is called Adelaide, and left.")
    driver.engine.speculator.earlier.add("mine", answer, frozenset())
    request = driver.request(ids(20), 60, salt="mine")
    driver.add(request)
    while not request.token_ids:
        driver.step()
    said = driver.llm.encoder.text("I know that the captain of")
    request.answer.token_ids[:] = said
    speculator = driver.engine.speculator
    assert " the seventh" in text_of(driver, speculator.drafts([request], 1, 100).get(request))
    driver.engine.evict_texts("mine")
    request.answer.token_ids[:] = [*said, answer[answer.index(said[-1]) + 1]]
    assert request not in speculator.drafts([request], 1, 100)


def test_time_of_steps_with_answers_alone_is_measured(driver):
    driver.engine.speculator = speculator = Speculator(RowCost({1: 1e-6}))
    request = driver.request("The first step computes a prompt.", 3)
    driver.add(request)
    driver.step()
    assert len(request.token_ids) == 1
    assert speculator.times.plain_s(1) == 0
    driver.step()
    assert speculator.times.plain_s(1) > 0


class Recorded(StepTimes):
    """Keeps the numbers of answers and draft tokens of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int]] = []

    def took(self, cost: RowCost, answers: int, drafted: int, seconds: float) -> None:
        self.steps.append((answers, drafted))


def test_steps_are_measured_with_their_draft_tokens(driver):
    driver.engine.speculator = speculator = Speculator(FREE, Hopeful)
    speculator.times = times = Recorded()
    requests = [driver.request("One two three four five. One two three four five. One two three", 40)]
    driver.run(*requests)
    assert sum(drafted for _, drafted in times.steps) == sum(speculator.drafted.values()) > 0
    assert {answers for answers, _ in times.steps} == {1}


def test_steps_that_fill_or_empty_the_queue_of_a_device_are_not_measured(driver, monkeypatch):
    sample_on_device(monkeypatch)
    driver.engine.speculator = speculator = Speculator(FREE)
    speculator.times = times = Recorded()
    request = driver.request("One", 8, ignore_eos=True)
    driver.add(request)
    measured = []
    while not request.finished:
        before = len(times.steps)
        driver.step()
        measured.append(len(times.steps) > before)
    # The prompt; a step that only starts the next token; steps that start one and take one; the end.
    assert measured[:2] == [False, False]
    assert any(measured)
    assert not measured[-1]
