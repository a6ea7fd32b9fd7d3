"""The token selection pass: it runs among other requests, and can be preempted and restarted like them."""

from __future__ import annotations

import time

import pytest

from inlay import Prompt, SamplingParams
from inlay.engine import kv_manager
from inlay.engine.prompt_state import PromptState
from inlay.engine.scheduler import Step
from inlay.errors import DeadlineError
from tests.model.engine.driving import Driver, check_stock
from tests.model.engine.test_recomputation import KINDS, SCHEMA, SELECTED, driver_for, prompt


@pytest.mark.parametrize("reuse", SELECTED)
def test_answer_depends_only_on_the_token_selection(reuse):
    """In passes of few tokens, beside others, given up on the way: the choice and the answer are the same."""
    alone = driver_for()
    first = alone.request(prompt("abc"), 8, reuse=reuse)
    alone.run(first)
    driver = driver_for(max_num_batched_tokens=8)
    others = [driver.request(prompt("cab", "Why?"), 8, reuse=other) for other in ("off", "anchored", *SELECTED)]
    again = driver.request(prompt("abc"), 8, reuse=reuse)
    driver.run(*others, again)
    assert again.prompt.recomputed == first.prompt.recomputed
    assert again.token_ids == first.token_ids
    assert driver.all_free()


@pytest.mark.parametrize("reuse", SELECTED)
def test_other_requests_find_only_tokens_read_without_recomputation(reuse):
    """Invariant 3: the layers that the selection pass computed stay private."""
    driver = driver_for()
    driver.run(driver.request(prompt("abc"), reuse=reuse))
    exact = driver.request(prompt("abc"), reuse="exact")
    driver.run(exact)
    check_stock(driver, exact)
    plain, apart = driver.request(prompt("abc"), 8, reuse="anchored"), driver_for()
    driver.run(plain)
    assert plain.usage.computed_tokens == len("Well?")
    assert apart.run(apart.request(prompt("abc"), 8, reuse="anchored")) == [tuple(plain.token_ids)]


@pytest.mark.parametrize("reuse", SELECTED)
def test_modules_computed_by_the_selection_pass_were_not_stored(reuse):
    driver = Driver()
    driver.schema(SCHEMA, encode=False)
    cold, warm = (driver.request(prompt("abc"), reuse=reuse) for _ in range(2))
    driver.run(cold)
    assert cold.usage.cached_tokens == 0
    assert sum(tokens for _, tokens in cold.usage.misses) > 0
    driver.run(warm)
    assert (warm.usage.computed_tokens, warm.usage.misses) == (1, ())
    assert warm.usage.recomputed_tokens == cold.usage.recomputed_tokens > 0


@pytest.mark.parametrize("reuse", SELECTED)
def test_released_selection_pass_leaves_nothing(reuse):
    driver, sampled = driver_for(max_num_batched_tokens=3), {"temperature": 1.0, "seed": 1, "n": 2}
    request = driver.request(prompt("abc"), 4, reuse=reuse, **sampled)
    driver.add(request)
    driver.step()
    assert request.selection is not None
    driver.engine.release(request)  # the other answer has another pass made
    driver.finish()
    alone = driver_for()
    expected = alone.request(prompt("abc"), 4, reuse=reuse, **sampled)
    alone.run(expected)
    assert request.followers[0].token_ids == expected.followers[0].token_ids != []
    assert driver.all_free()


@pytest.mark.parametrize("reuse", SELECTED)
def test_queue_time_ends_before_the_selection_pass(reuse, monkeypatch):
    """The time to read again after the wait, however long, does not count as time in the queue."""
    laid, real = [], kv_manager.allocation_of

    def slow(*asked):
        laid.append(asked)
        time.sleep(0.05 * (len(laid) > 1))
        return real(*asked)

    driver = driver_for()
    monkeypatch.setattr(kv_manager, "allocation_of", slow)
    (output,) = driver.llm.generate([prompt("abc")], SamplingParams(max_tokens=1), reuse=reuse)
    assert len(laid) == 2
    assert output.metrics.queue_s >= 0


@pytest.mark.parametrize("reuse", SELECTED)
def test_preempted_selection_pass_restarts(reuse):
    driver = driver_for(max_num_batched_tokens=3)
    request = driver.request(prompt("abc"), 4, reuse=reuse)
    driver.add(request)
    driver.step()
    driver.engine.scheduler.preempt(request, Step())
    assert request.selection is None
    driver.finish()
    alone = driver_for()
    assert alone.run(alone.request(prompt("abc"), 4, reuse=reuse)) == [tuple(request.token_ids)]
    assert driver.all_free()


@pytest.mark.parametrize("reuse", SELECTED)
def test_selection_pass_ends_at_its_deadline(reuse):
    driver = driver_for(max_num_batched_tokens=3)
    request = driver.request(prompt("abc"), 4, reuse=reuse, deadline=time.perf_counter() + 0.2)
    driver.add(request)
    driver.step()
    time.sleep(max(0.0, request.deadline - time.perf_counter()))
    driver.finish()
    assert isinstance(request.error, DeadlineError)
    assert driver.all_free()


@pytest.mark.parametrize("reuse", SELECTED)
def test_parts_of_messages_and_found_text_are_recomputed(reuse):
    texts = ["The first document of all, which is here.", "Another one that follows the first, of course."]
    driver = Driver()

    def asked(marked, order):
        mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
        parts = [{"type": "text", "text": texts[at], **mark} for at in order]
        return driver.request([{"role": "user", "content": [*parts, {"type": "text", "text": "Well?"}]}], reuse=reuse)

    first = asked(True, (0, 1))
    driver.run(first)
    assert first.usage.recomputed_tokens > 0 < first.usage.selecting_tokens
    found = asked(False, (1, 0))  # not marked by a request
    driver.run(found)
    assert found.usage.recomputed_tokens > 0 < found.usage.module_tokens
    assert driver.all_free()


@pytest.mark.parametrize("kind", KINDS)
def test_selection_query_is_limited_to_the_last_tokens(kind, monkeypatch):
    """The last tokens of a long text are the query; stored text before them is found as usual."""
    monkeypatch.setattr("inlay.prompt.composed.MOST_ROWS", 4)
    driver = driver_for()
    text, counts = "A long question, is it not?", []
    for _ in range(2):
        request = driver.request(prompt("abc", text), reuse=f"anchored+{kind}:0.3")
        driver.run(request)
        counts.append(request.usage.selecting_tokens)
    if kind != "blend":  # the text after the selected tokens is recomputed, and found the second time
        assert counts == [len(text), 4]
    else:
        assert counts[0] == counts[1] > 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["select", "run_to_check"])
def test_fault_in_a_selection_ends_only_its_request(kind, where, monkeypatch):
    def fault(*_):
        raise MemoryError

    apart, driver = driver_for(), driver_for()
    policies = ("anchored", "exact")
    alone = [apart.run(apart.request(prompt("cab", "Why?"), 12, reuse=reuse)) for reuse in policies]
    others = [driver.request(prompt("cab", "Why?"), 12, reuse=reuse) for reuse in policies]
    for other in others:
        driver.add(other)
    driver.step()
    failing = driver.request(prompt("abc"), 4, reuse=f"anchored+{kind}:0.3")
    driver.add(failing)
    monkeypatch.setattr(PromptState if where == "select" else driver.engine.runner, where, fault)
    driver.finish()
    fails = where == "select" or kind == "blend"
    assert (failing.error is not None) == fails
    assert [other.error for other in others] == [None, None]
    assert [[tuple(other.token_ids)] for other in others] == alone
    assert driver.all_free()


def test_keys_are_compared_block_by_block(monkeypatch):
    driver = driver_for()
    first = driver.request(prompt("abc"), reuse="anchored+blend:0.3")
    driver.run(first)
    monkeypatch.setattr("inlay.engine.runner.BLOCK_BYTES", 1)
    again = driver_for()
    request = again.request(prompt("abc"), reuse="anchored+blend:0.3")
    again.run(request)
    assert request.prompt.recomputed == first.prompt.recomputed


def test_text_computed_once_is_counted_once():
    """The prefix before all recomputed tokens is the same in both passes."""
    driver = driver_for()
    request = driver.request(
        Prompt.from_string('<prompt schema="s">Now. <a/><b/>Well?</prompt>'), reuse="anchored+query:0.3"
    )
    driver.run(request)
    assert request.usage.selecting_tokens == len("Well?")
    assert request.usage.computed_tokens == len("Now. ") + request.usage.recomputed_tokens + len("Well?")
