"""Shadow comparison: answers are compared with full prefill while the engine is idle, without effect on requests."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import replace

import pytest

from inlay import LLM, AsyncLLM, ParameterError, SamplingParams, Schema
from inlay.check.run import divergence
from inlay.engine.background import divergence as divergence_log
from inlay.engine.background.divergence import AnswerComparison
from inlay.engine.background.forced_runs import MOST_WAITING
from inlay.engine.request import Request
from inlay.types import DROP_REASONS, ShadowStats
from inlay_lab.eval.setting import Setting
from tests.conftest import tiny
from tests.model.engine.driving import Driver, ids, prompt_of, work_off
from tests.model.hooks import each_pass, failing
from tests.raising import PanicException, raises

SCHEMA = Schema.from_string(
    '<schema name="s">In front of all. <module name="a">The first module of them, say.</module>'
    '<module name="b">The second one, which is longer.</module><module name="c">A third, at last.</module>'
    '<module name="d">And one more.</module></schema>'
)


def prompt(names: str = "abc", text: str = "Well?"):
    return prompt_of(SCHEMA, names, text)


def driver_for(model: str = "llama", **settings) -> Driver:
    driver = Driver(model, **{"shadow": 1.0, "promotion_memory": 0, **settings})
    driver.schema(SCHEMA, reuse="anchored")
    return driver


def ask(driver: Driver, names: str = "abc", text: str = "Well?", **asked) -> Request:
    request = driver.request(prompt(names, text), **{"reuse": "anchored", **asked})
    driver.run(request)
    assert request.error is None
    return request


def stats(driver: Driver) -> ShadowStats:
    found = driver.llm.stats().shadow
    assert found is not None
    return found


def dropped(driver: Driver) -> dict[str, int]:
    return {reason: count for reason, count in stats(driver).dropped if count}


@pytest.fixture
def compared(monkeypatch) -> list[AnswerComparison]:
    """The list that receives each later comparison."""
    found: list[AnswerComparison] = []
    monkeypatch.setattr(
        divergence_log.DivergenceLog, "add", lambda self, subject, comparison, tenant="": found.append(comparison)
    )
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 7, 500])
@pytest.mark.parametrize(
    ("model", "reuse", "positions"),
    [
        ("llama", "anchored", None),
        ("llama", "isolated", "schema"),
        ("llama", "modular+linked:5", None),
        ("llama", "anchored+query:0.3", None),
        ("llama", "anchored+blend:0.3", None),
        ("gpt2", "anchored", "schema"),
        ("mistral", "isolated", None),
    ],
)
def test_reported_divergence_equals_full_prefill_comparison(compared, model, reuse, positions, tokens):
    driver = driver_for(model)
    request = ask(driver, "acd", reuse=reuse, positions=positions)
    assert work_off(driver.engine.shadow, tokens) > 1
    said = [request.token_ids]
    expected, found = (
        driver.llm.distributions([prompt("acd")], said, **policy)[0]
        for policy in ({"reuse": "off"}, {"reuse": reuse, "positions": positions})
    )
    (one,) = compared
    assert one.kl == pytest.approx(divergence(expected, found), rel=1e-3, abs=1e-7)
    assert one.kl > 1e-6
    assert (one.steps, one.agreeing) == (5, int((expected.argmax(-1) == found.argmax(-1)).sum()))
    assert stats(driver).samples == 1
    assert not work_off(driver.engine.shadow)
    assert driver.all_free()


def test_only_the_first_tokens_of_a_long_answer_are_compared(compared):
    driver = driver_for()
    request = ask(driver, tokens=90)
    work_off(driver.engine.shadow)
    said = [request.token_ids[:64]]
    expected, found = (driver.llm.distributions([prompt()], said, reuse=reuse)[0] for reuse in ("off", "anchored"))
    (one,) = compared
    assert one.steps == 64
    assert one.kl == pytest.approx(divergence(expected, found), rel=1e-3)


def test_exact_and_forced_answers_are_not_compared():
    driver = driver_for()
    for reuse in ("off", "exact"):
        ask(driver, reuse=reuse)
    ask(driver, "a")  # the first one stands right after its anchor
    ask(driver, forced="To be said.")  # a measurement, not a request
    given_up = driver.request(prompt(), 50, reuse="anchored")
    driver.add(given_up)
    driver.step(3)
    driver.engine.release(given_up)
    assert stats(driver).waiting == 0
    ask(driver, n=3, temperature=1.0)
    assert stats(driver).waiting == 1


def test_share_of_answers_is_compared():
    driver = driver_for(shadow=0.25, record=False)
    for number in range(60):  # fewer than may wait
        ask(driver, "ab", f"{number}?", tokens=1)
    assert 5 <= stats(driver).waiting <= 25


def test_zero_share_disables_comparison():
    driver = driver_for(shadow=0)
    ask(driver)
    assert driver.engine.shadow is None
    assert driver.llm.stats().shadow is None
    assert driver.llm.measure_divergence() == 0
    assert driver.llm.divergence() == ()


def test_nothing_is_compared_while_requests_run():
    driver = driver_for()
    ask(driver)
    driver.add(driver.request(ids(20), 30, reuse="exact"))
    while driver.engine.busy:
        assert not driver.engine.idle_step()
        driver.step()
    assert stats(driver).tokens == 0
    assert driver.engine.idle_step()
    assert stats(driver).tokens > 0


def test_profiles_and_promotion_run_before_comparisons():
    driver = driver_for(promotion_memory=0.1)
    for _ in range(2):
        ask(driver, reuse="modular")
    ask(driver, reuse="anchored+profiled:0.1")
    while driver.engine.idle_step(only=[driver.engine.profiler, driver.engine.promoter]):
        assert stats(driver).tokens == 0
    assert driver.engine.idle_step()
    assert stats(driver).tokens > 0


def test_new_request_finds_all_memory_free(compared):
    """A new request ends the comparison, which releases its slots and gives the same result later."""
    driver = driver_for()
    ask(driver)
    work_off(driver.engine.shadow)
    ask(driver)
    for steps in (1, 2, 10, 30):
        free = driver.store.pool.free_chunks
        for _ in range(steps):
            assert driver.engine.shadow.step(2)
        assert driver.store.pool.free_chunks < free
        ask(driver, "b", "Another?", reuse="exact")
        assert stats(driver).waiting == 1
    work_off(driver.engine.shadow)
    first, second = compared
    assert second.kl == pytest.approx(first.kl, rel=1e-3)
    assert driver.all_free()


def test_often_interrupted_sample_is_dropped():
    driver = driver_for()
    ask(driver)
    for number in range(20):
        driver.engine.shadow.step(5)
        ask(driver, "b", f"{number}?", reuse="exact")
    assert dropped(driver) == {"busy": 1}
    assert not work_off(driver.engine.shadow)
    assert driver.all_free()


def test_comparison_leaves_the_store_unchanged():
    """The comparison leaves nothing in the store."""
    driver = driver_for()
    ask(driver, salt="one")
    before = {(segment.place, segment.slots) for segment in driver.store}
    work_off(driver.engine.shadow)
    assert {(segment.place, segment.slots) for segment in driver.store} == before
    assert not any(segment.holds for segment in driver.store)
    exact = ask(driver, salt="one", reuse="exact", text="So?")
    assert exact.usage.computed_tokens == len("The second one, which is longer.A third, at last.So?")


@pytest.mark.parametrize("forget", ["store", "all"])
def test_sample_of_cleared_segments_is_dropped(forget):
    driver = driver_for()
    ask(driver)
    if forget == "store":
        driver.store.clear()
    else:
        driver.llm.reset_prefix_cache()
    work_off(driver.engine.shadow)
    assert dropped(driver) == {"gone": 1}
    assert driver.all_free()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("evict", ["texts", "modules"])
def test_answers_to_evicted_text_are_dropped(evict, begun):
    driver = driver_for()
    ask(driver, salt="one")
    ask(driver, "cd", salt="two")
    if begun:
        driver.engine.shadow.step(7)
    if evict == "texts":
        driver.engine.evict_texts("one")
    else:
        schemas = driver.llm.processor.schemas
        driver.engine.evict(schemas.every_spec(schemas.get("s"), driver.llm.policy("anchored"), modules=("a",)))
    assert stats(driver).waiting == 1
    assert dropped(driver) == {"gone": 1}
    driver.audit()
    work_off(driver.engine.shadow)
    assert driver.llm.divergence(cache_salt="one") == ()
    assert [one.samples for one in driver.llm.divergence(cache_salt="two")] == [1]


def test_sample_larger_than_its_pool_share_is_dropped():
    driver = driver_for(kv_tokens=400)
    ask(driver)
    work_off(driver.engine.shadow)
    assert dropped(driver) == {"no room": 1}
    assert driver.all_free()


def test_queue_is_bounded_and_fair_between_salts():
    driver = driver_for(record=False)
    ask(driver, salt="one")
    for number in range(MOST_WAITING + 5):
        ask(driver, text=f"{number}?", salt="two", tokens=1)
    assert stats(driver).waiting == MOST_WAITING
    assert dropped(driver) == {"busy": 6}
    work_off(driver.engine.shadow)
    assert [one.samples for one in driver.llm.divergence(cache_salt="one")] == [1]
    assert [one.samples for one in driver.llm.divergence(cache_salt="two")] == [MOST_WAITING - 1]
    assert driver.llm.divergence() == ()


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
@pytest.mark.parametrize("begun", [0, 3, 20])
def test_fault_ends_only_one_comparison(caplog, kind, begun):
    driver = driver_for()
    for _ in range(2):
        ask(driver)
    for _ in range(begun):
        assert driver.engine.shadow.step(5)

    with failing(driver.loaded, kind("a fault")), caplog.at_level(logging.ERROR):
        assert driver.engine.idle_step()
    assert "could not be compared" in caplog.text
    assert dropped(driver) == {"failed": 1}
    assert ask(driver, text="So?").usage.anchored_tokens > 0
    work_off(driver.engine.shadow)
    assert stats(driver).samples == 2
    assert driver.all_free()


def test_nan_logits_are_not_counted(caplog):
    driver = driver_for()
    ask(driver)
    with each_pass(driver.loaded, after=lambda logits: logits * math.nan), caplog.at_level(logging.ERROR):
        work_off(driver.engine.shadow)
    assert "hold NaN or inf" in caplog.text
    assert (dropped(driver), driver.llm.divergence()) == ({"failed": 1}, ())
    assert driver.all_free()


def test_comparison_ignores_later_promotions(compared):
    """The comparison uses the forms that the answer read, even after promotion stored more exact ones."""
    driver = driver_for(promotion_memory=0.1)
    first = ask(driver, reuse="modular")
    ask(driver, text="And?", reuse="modular")
    driver.llm.promote()
    assert ask(driver, text="So?", reuse="modular").usage.module_tokens == 0
    work_off(driver.engine.shadow)
    said = [first.token_ids]
    expected, found = (
        driver.llm.distributions([prompt()], said, reuse=reuse)[0] for reuse in ("off", "modular+promote:off")
    )
    assert compared[0].kl == pytest.approx(divergence(expected, found), rel=1e-3)
    assert len(compared) == 2, "the third one was exact"


def test_many_samples_in_a_small_pool_leave_counts_consistent():
    randomly = random.Random(5)
    driver = driver_for(kv_tokens=1200, max_num_seqs=3)
    alive: list[Request] = []
    for _ in range(40):
        names, salt = randomly.choice(["ab", "abc", "ba", "dca"]), randomly.choice(["", "one"])
        asked = {"reuse": randomly.choice(["modular", "isolated", "modular+linked:3", "exact"]), "salt": salt}
        alive.append(driver.request(prompt(names, randomly.choice(["What?", "Then?"])), 3, positions="packed", **asked))
        driver.add(alive[-1])
        for _ in range(randomly.choice([0, 5, 60])):
            driver.step() if driver.engine.busy else driver.engine.shadow.step(randomly.choice([3, 40]))
        if randomly.random() < 0.1:
            driver.engine.release(alive.pop())
    driver.finish()
    assert all(request.error is None for request in alive)
    found = stats(driver)
    assert found.samples > 5
    driver.engine.shadow.give_up()
    assert driver.all_free()
    assert set(dict(found.dropped)) == set(DROP_REASONS)


def test_engine_thread_compares_by_itself():
    async def run() -> int:
        llm = AsyncLLM(tiny("llama"), kv_memory="4MiB", seed=0, shadow=1.0)
        try:
            await llm.add_schema(SCHEMA)
            async for _ in llm.generate(prompt(), SamplingParams(temperature=0, max_tokens=3)):
                pass
            while not llm.divergence():
                await asyncio.sleep(0.01)
            return llm.divergence()[0].samples
        finally:
            llm.shutdown()

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 1


@pytest.mark.parametrize("share", [-0.1, 1.5, "much", True])
def test_invalid_share_is_rejected(share):
    with raises("parameter.out_of_range", ParameterError, names="shadow"):
        LLM(tiny("llama"), shadow=share)


@pytest.mark.parametrize("threshold", [0, -1, "much", True, float("nan"), float("inf")])
def test_invalid_threshold_is_rejected(threshold):
    with raises("parameter.out_of_range", ParameterError, names="shadow_threshold"):
        LLM(tiny("llama"), shadow=0.1, shadow_threshold=threshold)


def test_threshold_without_shadow_is_rejected():
    with raises("parameter.conflict", ParameterError, names="shadow_threshold"):
        LLM(tiny("llama"), shadow_threshold=0.5)


@pytest.mark.long
def test_only_a_schema_with_diverging_answers_falls_back(monkeypatch):
    """On the model in the package: counting needs sight across documents, and a fact of one document does not."""
    monkeypatch.setattr(divergence_log, "LOOK", 8)
    llm = LLM("demo", dtype="float32", kv_memory="64MiB", shadow=1.0, promotion_memory=0)
    randomly, params = random.Random(1), SamplingParams(temperature=0, max_tokens=4)
    taken = {}
    for seed, task, times in ((4, "single", 9), (5, "count", 17)):
        each = Setting(documents=6, questions=2, tasks=(task,), seed=seed).rounds(6)[0]
        llm.add_schema(each.schema(), replace=True)
        outputs = []
        for number in range(times):
            case = each.cases[number % 2]
            if task == "count":
                case = replace(case, imported=tuple(sorted(randomly.sample(range(12), 6))))
            outputs += llm.generate([each.prompt(case)], params)
            llm.measure_divergence()
        taken[task] = {(output.reuse, output.fell_back_from) for output in outputs}
    assert taken["single"] == {("modular", None)}
    assert taken["count"] == {("modular", None), ("modular+profiled:0.15", "modular")}
    single, count, recomputed = llm.divergence()
    assert single.kl < 0.02
    assert count.low > 0.1
    assert count.taken == "modular+profiled:0.15"
    assert (recomputed.reuse, recomputed.taken) == ("modular+profiled:0.15", None)
    assert recomputed.kl < 0.1
