"""Recomputed tokens are reused only after the same modules and token selection, and never by an exact request."""

from __future__ import annotations

import numpy as np
import pytest

from inlay import SamplingParams, Schema
from inlay.engine.background.profiler import KnownProfiles
from inlay.policy import ReusePolicy
from inlay.prompt.composed import RecomputedSpan
from inlay.types import Scope
from tests.model.engine.driving import Driver, check_stock, prompt_of

SCHEMA = Schema.from_string(
    '<schema name="s">In front of all. <module name="a">The first module of them, say.</module>'
    '<module name="b">The second one, which is longer.</module><module name="c">A third, at last.</module></schema>'
)
LINKED, PROFILED = "anchored+linked:5", "anchored+profiled:0.4"
KINDS = ["query", "profiled*query", "blend"]  # a selection pass chooses the tokens
SELECTED = [f"anchored+{kind}:0.3" for kind in KINDS]


def prompt(names: str, text: str = "Well?"):
    return prompt_of(SCHEMA, names, text)


def driver_for(**settings) -> Driver:
    driver = Driver(**settings)
    driver.schema(SCHEMA)
    draw = np.random.default_rng(0)
    for specs in driver.llm.processor.schemas.module_specs("s", driver.llm.policy("anchored")).values():
        for spec in specs:
            profile = draw.random(len(spec.ids)).astype(np.float16)
            driver.engine.kv_manager.profiles.add(spec.key, profile)
    return driver


@pytest.mark.parametrize("reuse", [LINKED, PROFILED])
def test_second_request_reuses_recomputed_tokens(reuse):
    driver = driver_for()
    first, second = (
        driver.request(prompt("abc", "Well?"), reuse=reuse),
        driver.request(prompt("abc", "And?"), reuse=reuse),
    )
    driver.run(first)
    driver.run(second)
    assert first.usage.recomputed_tokens == second.usage.recomputed_tokens > 0
    assert first.usage.computed_tokens == len("Well?") + first.usage.recomputed_tokens
    assert second.usage.computed_tokens == len("And?")
    longer = driver.request(prompt("ab"), reuse=LINKED)  # text after a module does not change its selected tokens
    driver.run(longer)
    assert longer.usage.computed_tokens == len("Well?") + (0 if reuse == LINKED else longer.usage.recomputed_tokens)


@pytest.mark.parametrize("reuse", [LINKED, PROFILED])
def test_recomputed_tokens_are_not_found_after_other_modules(reuse):
    driver = driver_for()
    driver.run(driver.request(prompt("abc"), reuse=reuse))
    other = driver.request(prompt("cab"), reuse=reuse)
    driver.run(other)
    assert other.usage.computed_tokens == len("Well?") + other.usage.recomputed_tokens


@pytest.mark.parametrize("reuse", [LINKED, PROFILED])
def test_exact_request_reads_no_recomputed_tokens(reuse):
    """Invariant 3."""
    driver = driver_for()
    driver.run(driver.request(prompt("abc"), reuse=reuse))
    exact = driver.request(prompt("abc"), reuse="exact")
    driver.run(exact)
    check_stock(driver, exact)
    plain = driver.request(prompt("abc"), reuse="anchored")
    driver.run(plain)
    # nor does a request without recomputation find the text after it
    assert plain.usage.computed_tokens == len("Well?")


def test_other_token_selection_is_not_reused():
    """The tokens after other choices attend to other keys, though their text is the same."""
    driver = driver_for()
    driver.run(driver.request(prompt("abc"), reuse=PROFILED))
    other = driver.request(prompt("abc"), reuse="anchored+profiled:0.5")
    driver.run(other)
    assert other.usage.computed_tokens > len("Well?") + other.usage.recomputed_tokens - 20


@pytest.mark.parametrize("reuse", [LINKED, PROFILED, *SELECTED])
def test_several_answers_share_recomputed_tokens(reuse):
    driver = driver_for()
    request = driver.request(prompt("abc"), 6, reuse=reuse, n=3, temperature=1.0, seed=1)
    driver.run(request)
    alone = driver_for()
    one = alone.request(prompt("abc"), 6, reuse=reuse, n=1, temperature=1.0, seed=1)
    alone.run(one)
    assert request.token_ids == one.token_ids
    assert {len(member.token_ids) for member in request.family} == {6}
    assert all(member.usage.computed_tokens == 1 for member in request.followers)
    assert [member.usage.selecting_tokens > 0 for member in request.family] == [reuse in SELECTED, False, False]
    assert driver.all_free()


@pytest.mark.parametrize(
    ("reuses", "kv_tokens"), [([LINKED, PROFILED, "anchored", PROFILED], 210), (["anchored", *SELECTED], 240)]
)
def test_a_tiny_pool_gives_the_same_answers_as_a_large_one(reuses, kv_tokens):
    """Preempted requests recompute their selected tokens again, or find them."""
    texts = ["Well?", "And then?", "Why, so?", "Who?"]

    def made(driver):
        return [driver.request(prompt("abc", text), 25, reuse=reuse) for text, reuse in zip(texts, reuses, strict=True)]

    large = driver_for()
    expected = large.run(*made(large))
    small = driver_for(kv_tokens=kv_tokens)
    requests = made(small)
    assert small.run(*requests) == expected
    assert sum(request.preemptions for request in requests)
    assert small.all_free()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_recomputed_tokens_of_a_cancelled_request_are_reused(steps):
    driver = driver_for(max_num_batched_tokens=8)
    first = driver.request(prompt("abc"), reuse=PROFILED)
    driver.add(first)
    driver.step(steps)
    driver.engine.release(first)
    again = driver.request(prompt("abc"), reuse=PROFILED)
    driver.run(again)
    assert again.usage.computed_tokens < len("Well?") + again.usage.recomputed_tokens
    whole = driver_for()
    assert whole.run(whole.request(prompt("abc"), reuse=PROFILED)) == [tuple(again.token_ids)]


def test_concurrent_requests_recompute_tokens_once():
    driver = driver_for()
    requests = [driver.request(prompt("abc", text), reuse="anchored+profiled:0.6") for text in ("Well?", "And?")]
    driver.run(*requests)
    assert sorted(request.usage.computed_tokens for request in requests)[0] == len("And?")


def test_conversation_after_recomputation_hits_its_history():
    driver = driver_for()
    driver.run(driver.request(prompt("abc"), reuse=PROFILED, forced=" It is so."))
    again = driver.request(prompt("abc", "Well? It is so. More?"), reuse=PROFILED)
    driver.run(again)
    assert again.usage.computed_tokens == len(". More?")  # the KV of the last generated token is not computed
    assert driver.all_free()


def test_scattered_tokens_of_a_module_form_one_span():
    driver = driver_for()
    request = driver.request(prompt("abc"), reuse=PROFILED)
    driver.add(request)
    driver.step()
    assert sum(isinstance(part, RecomputedSpan) for part in request.prompt.composed) <= 3
    driver.finish()


@pytest.mark.parametrize("reuse", [LINKED, PROFILED, *SELECTED])
def test_recomputed_tokens_are_kept_apart_by_salt(reuse):
    """This holds for public schemas, so that timing does not reveal other tenants' combinations."""
    driver = driver_for()
    counts = []
    for salt in ("one", "two", "one"):
        policy = driver.llm.policy(reuse)
        prepared = driver.llm.processor.process(prompt("abc"), SamplingParams(max_tokens=1), policy, Scope(salt))
        request = driver.llm.local.prepare(prepared)
        driver.run(request)
        counts.append(request.usage.computed_tokens)
    assert counts == [counts[0], counts[0], 1]


def test_profiles_are_bounded():
    profiles = KnownProfiles(most=10)
    for number in range(4):
        profiles.add(bytes([number]), np.zeros(4, dtype=np.float16))
        assert bytes([0]) not in profiles or profiles[bytes([0])].size  # the first one stays in use
    assert profiles.tokens == 8
    assert list(profiles) == [b"\x03", b"\x00"]
    assert profiles.version == 4


def test_without_a_profile_the_first_tokens_are_recomputed():
    driver = Driver()
    driver.schema(SCHEMA)
    request = driver.request(prompt("bc"), reuse=PROFILED)
    driver.run(request)
    assert request.usage.linked_tokens == request.usage.recomputed_tokens
    assert request.usage.recomputed_tokens == round(0.4 * len("A third, at last."))  # the other one is exact here
    assert ReusePolicy.parse(PROFILED).profiled


def test_conversation_keeps_its_selection_when_profiles_appear():
    driver = Driver()
    driver.schema(SCHEMA)
    history = "A first question, and its answer, which is not short."
    first = driver.request(prompt("abc", history), reuse=PROFILED)
    driver.run(first)
    assert first.usage.linked_tokens > 0
    draw = np.random.default_rng(0)
    for specs in driver.llm.processor.schemas.module_specs("s", driver.llm.policy("anchored")).values():
        for spec in specs:
            driver.engine.kv_manager.profiles.add(spec.key, draw.random(len(spec.ids)).astype(np.float16))
    goes_on = driver.request(prompt("abc", history + " And?"), reuse=PROFILED)
    driver.run(goes_on)
    assert goes_on.usage.linked_tokens == first.usage.linked_tokens
    assert goes_on.usage.computed_tokens == len(" And?")
    another = driver.request(prompt("abc", "Another question?"), reuse=PROFILED)
    driver.run(another)
    assert another.usage.linked_tokens == 0, "it has nothing to keep"
