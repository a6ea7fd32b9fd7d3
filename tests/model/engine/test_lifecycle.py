"""Requests that wait, are preempted, cancelled, expired, too large or invalid: each alone, and accounting balances."""

from __future__ import annotations

import re

import pytest
import torch

from inlay import CapacityError, ContextError, Schema
from inlay.engine import kv_manager
from inlay.engine.scheduler import Step
from inlay.errors import DeadlineError, InlayError, QueueFullError
from inlay.kv.store import SegmentStore
from tests.model.engine.driving import Driver, check_stock, ids
from tests.model.engine.test_sharing import SCHEMA, prompt_of
from tests.raising import raises


def mixed(driver: Driver) -> list:
    """Requests of all kinds: modules that are missing, exact prompts that begin alike, drawn answers, no reuse."""
    driver.schema(SCHEMA, encode=False)
    return [
        driver.request(prompt_of("a"), 14),
        driver.request(ids(20), 14, reuse="exact"),
        driver.request(prompt_of("ab"), 14, temperature=1.0, seed=7),
        driver.request(ids(20) + ids(6, 1), 14, temperature=0.8, seed=8),
        driver.request(ids(17, 3), 14, reuse="off"),
        driver.request(prompt_of("a", "And?"), 14),
    ]


# Preemption


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_tiny_pool_gives_the_same_answers_as_a_large_one(name):
    """By preemption and recomputing; seeds included."""
    settings = {"positions": "schema"} if name == "gpt2" else {}
    large = Driver(name, **settings)
    expected = large.run(*mixed(large))
    tiny = Driver(name, kv_tokens=140, **settings)
    requests = mixed(tiny)
    assert tiny.run(*requests) == expected
    assert sum(request.preemptions for request in requests) > 2
    check_stock(tiny, requests[1])
    check_stock(tiny, requests[4])
    assert tiny.all_free()


def test_preempted_request_finds_its_computed_tokens():
    driver = Driver(kv_tokens=60)
    one, other = driver.request(ids(20), 30), driver.request(ids(20, 1), 12)
    driver.run(one, other)
    assert other.preemptions
    check_stock(driver, one)
    check_stock(driver, other)
    assert other.usage.cached_tokens == 0  # the match of the first admission, without its own work


def test_request_that_fits_finishes_despite_many_preemptions():
    """Each preemption leaves a partly filled chunk: if they were read where they lie, they would fill the pool."""
    driver = Driver(kv_tokens=96, chunk_size=16)
    urgent = [driver.request(ids(14, 2 + n), 3, priority=-1) for n in range(6)]
    large = driver.request(ids(40), 40)
    driver.add(large)
    for request in urgent:
        driver.add(request)
        driver.step(4)
        driver.engine.scheduler.preempt(large, Step())
        driver.audit()
    driver.finish()
    assert large.error is None
    assert len(large.token_ids) == 40
    check_stock(driver, large)
    assert driver.all_free()


def test_pool_of_exactly_the_request_size_suffices():
    """40 tokens of prompt and 24 of answer, of which the last is never computed, in 64 slots."""
    driver = Driver(kv_tokens=64, chunk_size=16)
    driver.run(driver.request(ids(20), 3), driver.request(ids(7, 4), 3))
    request = driver.request(ids(40), 24)
    driver.run(request)
    assert len(request.token_ids) == 24
    check_stock(driver, request)


def test_scattered_segments_are_recomputed_if_the_pool_is_full():
    """Every module in a chunk of its own: read where they lie they would fill the pool."""
    schema = Schema.from_string(
        '<schema name="s">' + "".join(f'<module name="m{n}">{n}n.</module>' for n in range(5)) + "</schema>"
    )
    driver = Driver(kv_tokens=80, chunk_size=16, reuse="isolated")
    for n in range(5):
        driver.schema(schema, encode=False)
        driver.run(driver.request(schema.prompt().use(f"m{n}").text("?"), 1))
    prompt = schema.prompt()
    for n in range(5):
        prompt = prompt.use(f"m{n}")
    request = driver.request(prompt.text("!"), 20)
    driver.run(request)
    assert request.error is None
    assert len(request.token_ids) == 20
    assert driver.all_free()


# Priorities, deadlines, a bounded line


def test_higher_priority_runs_first():
    driver = Driver(max_num_seqs=1)
    running, late, urgent = (driver.request(ids(9, n), 3, priority=p) for n, p in enumerate((0, 1, -1)))
    driver.add(running)
    driver.step()
    driver.add(late, urgent)
    driver.finish()
    assert running.answer.first_token_at < urgent.answer.first_token_at < late.answer.first_token_at


def test_expired_request_ends_and_others_continue(clock):
    driver = Driver(max_num_seqs=2)
    running, other = driver.request(ids(9), 20, deadline=1e9), driver.request(ids(9, 1), 6)
    waiting = driver.request(ids(9, 2), 6, deadline=1e9)
    driver.add(running, other, waiting)
    driver.step(3)
    clock.advance(1e9)
    heard = driver.step()
    assert {running, waiting} <= set(heard)
    for request in (running, waiting):
        assert isinstance(request.error, DeadlineError)
        assert str(request.error) == f"request {request.id}: its deadline has passed"
        assert not request.allocation.tail
    assert driver.engine.scheduler.running == [other]
    driver.finish()
    check_stock(driver, other)
    assert driver.all_free()


def test_full_queue_takes_all_answers_of_a_request_or_none():
    driver = Driver(max_waiting=3)
    driver.add(driver.request(ids(5), 2, n=2, temperature=1.0))
    refused = driver.request(ids(5), 2, n=2, temperature=1.0)
    with raises("engine.queue_full", QueueFullError, names="3"):
        driver.add(refused)
    assert len(driver.engine.scheduler.waiting) == 2
    driver.finish()
    assert not refused.token_ids


# Cancellation


@pytest.mark.parametrize("victim", range(6))
def test_cancelling_at_any_step_releases_everything(victim):
    expected = None
    for moment in (0, 1, 2, 5, 13, 30):
        driver = Driver(kv_tokens=200, prefill_chunk=7, max_num_batched_tokens=12)
        requests = mixed(driver)
        driver.add(*requests)
        driver.step(moment)
        ended = requests[victim].finished
        driver.engine.release(requests[victim])
        driver.engine.release(requests[victim])  # a second time does nothing
        driver.audit()
        driver.finish()
        answers = [request.token_ids for request in requests]
        if expected is None:
            alone = Driver()
            expected = [list(tokens) for tokens in alone.run(*mixed(alone))]
        for number, answer in enumerate(answers):
            if number == victim and not ended:
                assert answer == expected[number][: len(answer)]
            else:
                assert answer == expected[number]
        assert driver.all_free()


def test_request_waiting_for_a_cancelled_one_computes_the_rest():
    driver = Driver(max_num_batched_tokens=8)
    one, other = driver.request(ids(40)), driver.request(ids(40))
    driver.add(one, other)
    driver.step(2)
    assert driver.engine.scheduler.waiting == [other]
    driver.engine.release(one)
    driver.finish()
    assert other.usage.cached_tokens == 16
    check_stock(driver, other)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("steps", range(1, 9))
def test_computed_prompt_of_a_cancelled_request_is_reused(name, steps):
    """Also if it was cancelled in the middle of its prompt."""
    driver, alone = Driver(name, max_num_batched_tokens=8), Driver(name)
    first, again = driver.request(ids(60), 4), driver.request(ids(60), 4)
    driver.add(first)
    driver.step(steps)
    left = first.prompt_left
    driver.engine.release(first)
    assert driver.run(again) == alone.run(alone.request(ids(60), 4))
    assert again.usage.computed_tokens == max(left, 1)
    check_stock(driver, again)
    assert driver.all_free()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("steps", range(1, 12))
def test_computed_modules_of_a_cancelled_request_are_reused(steps):
    driver, alone = Driver(max_num_batched_tokens=8), Driver()
    for each in (driver, alone):
        each.schema(SCHEMA, encode=False)
    first, again = driver.request(prompt_of("ab"), 4), driver.request(prompt_of("ab"), 4)
    driver.add(first)
    driver.step(steps)
    modules = [prefill for prefill in first.allocation.prefill if prefill.module]
    left = sum(len(prefill.keep.ids) for prefill in modules)
    own = first.prompt_left - sum(prefill.tokens_left for prefill in modules)
    driver.engine.release(first)
    assert driver.run(again) == alone.run(alone.request(prompt_of("ab"), 4))
    assert again.usage.computed_tokens == max(left + own, 1)
    assert driver.all_free()


def test_generated_tokens_of_a_cancelled_request_are_reused():
    driver = Driver()
    request = driver.request(ids(20), 30)
    driver.add(request)
    driver.step(8)
    driver.engine.release(request)
    assert len(request.token_ids) == 8
    again = driver.request(ids(20) + request.token_ids + [1])
    driver.run(again)
    assert again.usage.cached_tokens == 27  # the last generated token was not computed
    check_stock(driver, again)


# Chunked prefill


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_prompts_in_tiny_chunks_give_the_same_answers(name):
    settings = {"positions": "schema"} if name == "gpt2" else {}
    whole = Driver(name, **settings)
    expected = whole.run(*mixed(whole))
    cut = Driver(name, prefill_chunk=3, max_num_batched_tokens=9, **settings)
    requests = mixed(cut)
    assert cut.run(*requests) == expected
    assert max(cut.passes) <= 9
    check_stock(cut, requests[1])


# Errors


def test_request_larger_than_the_pool_fails_and_others_continue():
    driver = Driver(kv_tokens=64)
    large, small = driver.request(ids(70), 2), driver.request(ids(9))
    driver.run(large, small)
    assert isinstance(large.error, CapacityError)
    assert "the request needs 72 tokens of KV and the pool holds 64; give kv_memory at least" in str(large.error)
    check_stock(driver, small)


def test_memory_named_by_the_error_suffices():
    """Also where less than half a MiB is missing, which must not be rounded away."""
    driver = Driver(kv_tokens=64)
    large = driver.request(ids(1000), 2)
    driver.run(large)
    said = re.search(r"give kv_memory at least (\d+) MiB", str(large.error))
    again = Driver(kv_tokens=int(said[1]) * 2**20 // driver.store.pool.bytes_per_token)
    fits = again.request(ids(1000), 2)
    again.run(fits)
    assert fits.error is None


def test_request_outgrowing_the_pool_fails_and_others_continue():
    driver = Driver(kv_tokens=64)
    large, small = driver.request(ids(20), 100), driver.request(ids(9, 1), 30)
    driver.run(large, small)
    assert isinstance(large.error, CapacityError)
    assert "the request needs 68 tokens of KV and the pool holds 64" in str(large.error)
    assert 40 < len(large.token_ids) < 50
    check_stock(driver, small)
    assert driver.all_free()


@pytest.mark.parametrize("n", [1, 2])
def test_answer_without_a_limit_ends_when_the_pool_is_full(n):
    driver = Driver(kv_tokens=64)
    request, small = driver.request(ids(20), max_tokens=None, n=n, temperature=n - 1.0), driver.request(ids(9, 1), 10)
    driver.run(request, small)
    for member in request.family:
        assert (member.answer.finish_reason, member.error) == ("length", None)
        assert 40 < len(member.token_ids) < 50
        check_stock(driver, member)
    assert request.answered
    check_stock(driver, small)
    assert driver.all_free()


def test_prompt_beyond_the_context_is_rejected_before_queueing():
    driver = Driver()
    with raises("request.too_long", ContextError, names="2047"):
        driver.request([1] * 2048)
    assert not driver.engine.busy


def test_invalid_logits_end_only_their_request():
    driver = Driver()
    run = driver.engine.runner.run

    def damaged(work, rows, plan=None, **_):
        logits = run(work, rows, plan).clone()
        if len(driver.passes) == 2:  # and this is the third
            logits[1] = torch.nan
        return logits

    driver.engine.runner.run = damaged
    requests = [driver.request(ids(9 + n, n), 8) for n in range(3)]
    driver.run(*requests)
    assert type(requests[1].error) is InlayError
    assert "the logits of token 3 of the answer hold NaN" in str(requests[1].error)
    assert len(requests[1].token_ids) == 2
    for request in (requests[0], requests[2]):
        check_stock(driver, request)
    assert driver.all_free()


def test_invalid_logits_in_a_shared_module_prefix_end_only_their_request():
    """Two missing modules, one a prefix of the other, share one segment."""
    schema = Schema.from_string(
        '<schema name="s"><module name="long">the same words, and more of them</module>'
        '<module name="short">the same words</module></schema>'
    )
    driver = Driver(reuse="isolated")
    driver.schema(schema, encode=False)
    run = driver.engine.runner.run

    def damaged(work, rows, plan=None, **_):
        logits = run(work, rows, plan).clone()
        if not driver.passes:
            logits[0] = torch.nan
        return logits

    driver.engine.runner.run = damaged
    bad = driver.request(schema.prompt().use("long").use("short").text("?"))
    good = driver.request(ids(9, 3))
    driver.run(bad, good)
    assert "hold NaN" in str(bad.error)
    check_stock(driver, good)
    assert driver.all_free()


@pytest.mark.parametrize(("owner", "step"), [(SegmentStore, "allocate"), (kv_manager, "allocation_of")])
def test_fault_at_admission_ends_only_that_request_and_leaks_no_memory(monkeypatch, owner, step):
    """At the fault, the prefix match has references and room has been made."""
    driver = Driver()
    first = driver.request(ids(200), 4)
    driver.run(first)

    def broken(*_: object, **how: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(owner, step, broken)
        failed = driver.request(ids(200) + ids(9, 1), 4)
        driver.add(failed)
        driver.step()
        assert str(failed.error) == "broken"
    again = driver.request(ids(200) + ids(9, 1), 4)
    driver.run(again)
    check_stock(driver, again)
    assert driver.all_free()


@pytest.mark.parametrize("step", ["insert", "longest"])
def test_fault_while_storing_results_affects_no_other_request(step):
    """The fault occurs as a request ends, and as one is cancelled in the middle of its prompt."""
    driver = Driver(max_num_batched_tokens=32)
    ending, begun, other = driver.request(ids(20), 3), driver.request(ids(90, 1)), driver.request(ids(20, 2), 8)
    driver.add(ending, begun, other)
    driver.step()
    works, release = getattr(driver.store, step), driver.engine.kv_manager.release

    def broken(*_: object, **how: object) -> None:
        raise RuntimeError("broken")

    def broken_release(task) -> None:
        setattr(driver.store, step, broken)
        release(task)
        setattr(driver.store, step, works)

    driver.engine.kv_manager.release = broken_release
    driver.engine.release(begun)
    while not ending.finished:
        driver.step()
    assert ending.error is None
    driver.finish()
    assert len(driver.engine.kv_manager.pending) == 0
    check_stock(driver, other)
    assert driver.all_free()


def test_failed_forward_pass_ends_only_its_requests():
    driver = Driver(max_num_seqs=2)
    run = driver.engine.runner.run
    broken = [False]

    def fails(work, rows, plan=None, **_):
        if broken[0]:
            broken[0] = False
            raise RuntimeError("broken")
        return run(work, rows, plan)

    driver.engine.runner.run = fails
    requests = [driver.request(ids(20) + ids(9, n), 8) for n in range(4)]
    driver.add(*requests)
    driver.step(3)
    inside = list(driver.engine.scheduler.running)
    broken[0] = True
    heard = driver.step()
    assert set(inside) <= set(heard)
    assert [str(request.error) for request in inside] == ["broken"] * 2
    driver.finish()
    others = [request for request in requests if request not in inside]
    for request in others:
        check_stock(driver, request)
    # Chunks that the failed pass may have half written are dropped.
    again = driver.request(list(inside[0].ids) + inside[0].token_ids)
    driver.run(again)
    check_stock(driver, again)
    assert driver.all_free()


def test_failed_prompt_is_not_stored():
    driver = Driver(max_num_batched_tokens=16)
    run = driver.engine.runner.run

    def fails(work, rows, plan=None, **_):
        if len(driver.passes) == 1:
            raise RuntimeError("broken")
        return run(work, rows, plan)

    driver.engine.runner.run = fails
    one, other = driver.request(ids(40)), driver.request(ids(40))
    driver.add(one)
    driver.step(2)
    assert str(one.error) == "broken"
    assert len(driver.store) == 0
    driver.engine.runner.run = run
    driver.run(other)
    check_stock(driver, other)
