"""Sharing between requests: found at run time, in one physical copy, and never approximate for ``exact`` requests."""

from __future__ import annotations

import itertools
import random

import pytest

from inlay import Schema
from inlay.prompt.composed import CachedSpan
from tests.conftest import FAMILIES
from tests.counting import calls_of
from tests.model.engine.driving import Driver, check_stock, ids, slots
from tests.model.equivalence.recorder import close
from tests.model.equivalence.test_modules import oracle_logits

SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">The first module.</module><module name="b">Another one.</module>'
    '<module name="c">And a third, longer one.</module> Behind.</schema>'
)


def usage(request) -> tuple[int, int, int]:
    return request.usage.exact_tokens, request.usage.module_tokens, request.usage.computed_tokens


def prompt_of(names: str, text: str = "What of it?"):
    prompt = SCHEMA.prompt()
    for name in names:
        prompt = prompt.use(name)
    return prompt.text(text)


# Prompts that begin alike


@pytest.mark.parametrize("name", FAMILIES)
def test_common_prefix_is_shared_without_a_hint(name):
    driver = Driver(name)
    begin = ids(30)  # ends within a chunk
    one, other = driver.request(begin + ids(11, 1), 12), driver.request(begin + ids(7, 2), 12)
    driver.add(one)
    driver.step(2)
    driver.add(other)
    driver.step()
    assert slots(one.allocation.context, 30) == slots(other.allocation.context, 30)
    assert slots(one.allocation.context, 31)[-1] != slots(other.allocation.context, 31)[-1]
    driver.finish()
    assert (usage(one), usage(other)) == ((0, 0, 41), (30, 0, 7))
    check_stock(driver, one)
    check_stock(driver, other)


def test_prompts_that_arrive_in_the_same_step_share_too():
    driver = Driver()
    begin = ids(30)
    requests = [driver.request(begin + ids(5 + n, 1 + n), 12) for n in range(3)]
    alone = driver.request(ids(9, 9), 12)
    driver.add(*requests, alone)
    driver.step()
    assert driver.engine.scheduler.running == [requests[0], alone]  # the others wait for the first alone
    driver.step()
    assert len({tuple(slots(request.allocation.context, 30)) for request in requests}) == 1
    driver.finish()
    assert [request.usage.cached_tokens for request in requests] == [0, 30, 30]
    assert driver.passes[:2] == [35 + 9, 1 + 1 + 6 + 7]
    for request in (*requests, alone):
        check_stock(driver, request)


def test_short_common_prefix_is_not_waited_for():
    """With fewer than 16 tokens in common, a request does not wait for another one. It computes them in the same
    step.
    """
    driver = Driver()
    driver.add(driver.request(ids(10) + ids(20, 1)), driver.request(ids(10) + ids(20, 2)))
    driver.step()
    assert driver.passes == [60]
    driver.finish()
    assert driver.store.tokens == 10 + 2 * (20 + 4)  # and one copy is kept


def test_request_waits_only_for_the_shared_part_of_a_prompt():
    driver = Driver(max_num_batched_tokens=32)
    long = driver.request(ids(20) + ids(400, 1), 2)
    driver.add(long)
    driver.step()
    short = driver.request(ids(20) + ids(8, 2), 2)
    driver.add(short)
    driver.step()
    assert len(short.token_ids) == 1
    assert short.usage.cached_tokens == 20
    same = driver.request(ids(20) + ids(400, 1) + ids(3, 5), 2)  # continues as the long one does, and waits for it
    driver.add(same)
    driver.step(2)
    assert same in driver.engine.scheduler.waiting
    driver.finish()
    assert same.usage.cached_tokens == 420
    for request in (long, short, same):
        check_stock(driver, request)
    assert driver.all_free()


def test_short_shared_prefix_holds_few_chunks():
    driver = Driver(chunk_size=4)
    driver.run(driver.request(ids(400), 1))
    driver.add(driver.request(ids(20) + ids(8, 1), 50))
    driver.step(2)
    held = driver.engine.stats().held_chunks
    assert held <= 5 + 3 + 1


def test_a_branch_in_the_middle_of_a_segment_is_found_again():
    driver = Driver()
    trunk = ids(40)
    first = driver.request(trunk)
    driver.run(first)
    branch = driver.request(trunk[:13] + ids(20, 1))
    driver.run(branch)
    again, third = driver.request(trunk[:13] + ids(20, 1)), driver.request(trunk[:13] + ids(9, 1) + ids(4, 5))
    driver.run(again)
    driver.run(third)
    whole = driver.request(trunk + ids(3, 7))
    driver.run(whole)
    cached = [request.usage.cached_tokens for request in (first, branch, again, third, whole)]
    assert cached == [0, 13, 32, 22, 40]
    for request in (first, branch, again, third, whole):
        check_stock(driver, request)
    assert driver.all_free()


@pytest.mark.parametrize(("names", "computed"), [("", 1), ("a", len(" Behind.What of it?"))])
def test_exact_text_is_found_after_a_module_that_is_its_prefix(names, computed):
    """It is stored as one segment, and a module that is read from its first tokens ends within it."""
    driver = Driver(chunk_size=4)
    driver.llm.add_schema(SCHEMA, encode=False)
    first = driver.request(prompt_of(names), reuse="exact")
    driver.run(first)
    again = driver.request(prompt_of(names), reuse="anchored")
    driver.run(again)
    assert first.usage.cached_tokens == 0
    assert again.usage.computed_tokens == computed
    if not names:
        check_stock(driver, again)
    assert driver.all_free()


def test_a_full_match_computes_one_token():
    driver = Driver()
    prompt = ids(33)
    driver.run(driver.request(prompt))
    driver.passes.clear()
    again = driver.request(prompt)
    driver.run(again)
    assert driver.passes == [1] * 5
    assert usage(again) == (32, 0, 1)
    check_stock(driver, again)


def test_equal_prompts_wait_only_for_the_first():
    driver = Driver()
    requests = [driver.request(ids(33), 4) for _ in range(10)]
    driver.add(*requests)
    driver.step(2)
    assert driver.passes == [33, 1 + 9]
    driver.finish()
    assert len({tuple(request.token_ids) for request in requests}) == 1
    assert [request.usage.computed_tokens for request in requests] == [33] + [1] * 9


def test_waiting_request_is_not_looked_up_at_every_step(monkeypatch):
    """A look-up takes time in proportion to both lengths. The waiting request continues once the other one is
    cancelled.
    """
    driver = Driver(max_num_batched_tokens=32)
    first, *waiting = [driver.request(ids(400), 2) for _ in range(12)]
    driver.add(first, *waiting)
    driver.step(2)
    looked = calls_of(monkeypatch, driver.store, "longest")
    driver.step(5)
    assert not looked
    assert len(driver.engine.scheduler.waiting) == 11
    driver.engine.release(first)
    driver.step()
    assert len(looked) > 0
    driver.finish()
    for request in waiting:
        check_stock(driver, request)


def test_several_answers_share_their_prompt():
    driver = Driver()
    leader = driver.request(ids(33), 4, n=3, temperature=1.0)
    driver.add(leader)
    driver.step(2)
    assert driver.passes == [33, 1 + 2]
    assert len({tuple(slots(member.allocation.context, 32)) for member in leader.family}) == 1
    driver.finish()
    assert leader.answered


# Conversations


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_hits_its_own_history(name):
    driver = Driver(name)
    history: list[int] = []
    for turn in range(4):
        request = driver.request(history + ids(9, turn), 6, reuse="exact")
        driver.run(request)
        # The last generated token was never computed.
        assert request.usage.cached_tokens == max(0, len(history) - 1)
        check_stock(driver, request)
        history += [*ids(9, turn), *request.token_ids]


@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_conversation_over_modules_hits_its_history(name, reuse):
    driver = Driver(name, reuse=reuse)
    driver.schema(SCHEMA)
    text = "Tell me."
    modules = len("In front. And a third, longer one. Behind.")
    for turn in range(3):
        prompt = prompt_of("c", text)
        request = driver.request(prompt, forced=" Well, it is so.")
        driver.run(request)
        own = request.usage.cached_tokens - modules
        assert own == (0 if turn == 0 else len(text) - len(" And then?") - 1)
        expected = oracle_logits(
            driver.loaded, driver.llm, prompt, request.token_ids, reuse, driver.llm.positions_for(reuse)
        )
        for row, wanted in zip(driver.logits[request], expected, strict=True):
            close(row, wanted)
        text += " Well, it is so. And then?"


# Invariant 3


MODES = [("isolated", "schema"), ("anchored", "schema"), ("isolated", "packed"), ("anchored", "packed")]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("names", ["", "a", "ac", "bc"])
def test_exact_requests_equal_the_stock_model_after_modular_ones(name, names):
    """Modular prompts, their tails and their answers are in the store, under the same ids as the exact request."""
    driver = Driver(name)
    for reuse, positions in MODES:
        if (name, positions) != ("gpt2", "packed"):
            driver.schema(SCHEMA, reuse=reuse, positions=positions)
            driver.run(driver.request(prompt_of(names), 3, reuse=reuse, positions=positions))
    longer = [*driver.llm.encoder.text("What of it?")]
    for reuse, positions in (("exact", "packed"), ("exact", "schema"), ("off", "schema"), ("exact", "packed")):
        request = driver.request(prompt_of(names), 3, reuse=reuse, positions=positions)
        plain = driver.request([*request.ids, *longer], 3, reuse=reuse)
        for one in (request, plain):
            driver.run(one)
            assert one.usage.module_tokens == 0
            check_stock(driver, one)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_random_modes_one_after_another_and_concurrently(name):
    """The answers do not depend on the store or on other requests of the same step."""
    driver, randomly = Driver(name), random.Random(3)
    driver.schema(SCHEMA, encode=False)
    modes = [*MODES, ("exact", "packed"), ("exact", "schema"), ("off", "packed"), ("off", "schema")]
    if name == "gpt2":
        modes = [mode for mode in modes if mode[0] in ("exact", "off") or mode[1] == "schema"]
    checked = 0
    for _ in range(12):
        requests = []
        for _ in range(randomly.randrange(1, 5)):
            reuse, positions = randomly.choice(modes)
            prompt = prompt_of("".join(c for c in "abc" if randomly.random() < 0.5), randomly.choice(["What?", "Why?"]))
            requests.append((driver.request(prompt, 3, reuse=reuse, positions=positions), reuse))
        driver.add(*(request for request, _ in requests))
        driver.step(randomly.randrange(4))
        if randomly.random() < 0.3:
            driver.store.clear()
        driver.finish()
        for request, reuse in requests:
            if reuse in ("exact", "off"):
                check_stock(driver, request)
                assert request.usage.module_tokens == 0
                checked += 1
    assert checked > 8


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_isolated_module_at_the_start_is_exact(name):
    """A module that saw nothing in front of it is exact where nothing stands there; after it another record begins."""
    schema = Schema.from_string(
        '<schema name="s"><module name="a">The first module.</module><module name="b">Another.</module></schema>'
    )
    driver = Driver(name, reuse="isolated", positions="schema")
    driver.schema(schema)
    driver.run(driver.request(schema.prompt().use("a").use("b").text("Well?")))
    request = driver.request(schema.prompt().use("a").use("b").text("Well?"), reuse="exact")
    driver.run(request)
    assert request.usage.exact_tokens == len("The first module.")
    check_stock(driver, request)
    # The second alone stands at position 17: where positions are learned that is another segment.
    later = driver.request([*driver.llm.encoder.text("Another.Well?")], reuse="exact")
    driver.run(later)
    assert later.usage.exact_tokens == (0 if name == "gpt2" else len("Another."))
    check_stock(driver, later)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_position_gap_makes_a_different_prompt(name):
    """The same ids with a gap in front of the last words and without it."""
    driver = Driver(name, reuse="exact")
    driver.schema(SCHEMA)
    seen = []
    for positions in ("schema", "packed", "schema", "packed"):
        request = driver.request(prompt_of("b"), positions=positions)
        driver.run(request)
        check_stock(driver, request)
        seen.append(request)
    assert [request.ids for request in seen] == [seen[0].ids] * 4
    assert seen[0].positions != seen[1].positions
    assert [request.usage.cached_tokens for request in seen[:2]] == [0, len("In front. ")]
    assert [request.usage.computed_tokens for request in seen[2:]] == [1, 1]


def test_off_neither_finds_nor_stores():
    driver = Driver(reuse="off")
    prompt = ids(30)
    driver.run(driver.request(prompt, reuse="exact"))
    stored = driver.store.tokens
    one, other = driver.request(prompt), driver.request(prompt)
    driver.add(one, other)
    driver.step()
    assert not set(slots(one.allocation.context, 30)) & set(slots(other.allocation.context, 30))
    driver.finish()
    assert (usage(one), usage(other)) == ((0, 0, 30), (0, 0, 30))
    assert driver.store.tokens == stored
    check_stock(driver, one)
    check_stock(driver, other)


# Modules


def test_small_modules_share_chunks():
    names = [f"m{n}" for n in range(8)]
    schema = Schema.from_string(
        '<schema name="s">' + "".join(f'<module name="{n}">{n[1]}m.</module>' for n in names) + "</schema>"
    )
    for encode in (True, False):
        driver = Driver(chunk_size=16, reuse="isolated")
        driver.schema(schema, encode=encode)
        prompt = schema.prompt()
        for name in names:
            prompt = prompt.use(name)
        request = driver.request(prompt.text("?"), 1)
        driver.run(request)
        modules = [segment for segment in driver.store if segment.tokens == 3]
        assert len(modules) == 8
        assert len({chunk for segment in modules for chunk in driver.store.pool.chunks_of(segment.slots)}) == 2
        assert usage(request) == ((3, 21, 1) if encode else (0, 0, 25))
        assert driver.all_free()


@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
def test_missing_modules_are_computed_once_for_concurrent_requests(reuse):
    driver = Driver(reuse=reuse)
    driver.schema(SCHEMA, encode=False)
    texts = ("Well?", "Go on?", "And what of it?")
    requests = [driver.request(prompt_of("ac", text), 4) for text in texts]
    driver.add(*requests)
    driver.step(3)
    modules = len(requests[0].ids) - len("Well?")
    assert len({tuple(slots(request.allocation.context, modules)) for request in requests}) == 1
    driver.finish()
    assert [request.usage.cached_tokens for request in requests] == [0, modules, modules]
    for request, text in zip(requests, texts, strict=True):
        expected = oracle_logits(driver.loaded, driver.llm, prompt_of("ac", text), request.token_ids, reuse, "packed")
        for row, wanted in zip(driver.logits[request], expected, strict=True):
            close(row, wanted)


LONG = Schema.from_string(
    """<schema name="s">In front. <module name="a">The first module goes on for a while.</module><module
    name="b">The first module goes on, but not as the other did; this one is longer.</module></schema>"""
)


@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("left", [4, 8, 33])
def test_module_without_its_end_is_completed(name, reuse, left):
    positions = "schema" if name == "gpt2" else "packed"
    driver = Driver(name, reuse=reuse, positions=positions, prefill_chunk=7)
    driver.schema(LONG)
    request, again = (driver.request(LONG.prompt().use("b").text("Well?"), 4) for _ in range(2))
    stored = max(
        (part.spec for part in request.prompt.composed if isinstance(part, CachedSpan)), key=lambda spec: len(spec.ids)
    )
    with driver.store.hold(driver.store.longest(stored, most=left)):
        driver.store.clear()
    driver.run(request)
    assert request.usage.cached_tokens == left
    expected = oracle_logits(
        driver.loaded, driver.llm, LONG.prompt().use("b").text("Well?"), request.token_ids, reuse, positions
    )
    for row, wanted in zip(driver.logits[request], expected, strict=True):
        close(row, wanted)
    assert driver.run(again) == [tuple(request.token_ids)]
    assert again.usage.computed_tokens == 1
    assert driver.all_free()


def test_module_is_completed_once_from_a_common_prefix():
    driver = Driver(max_num_batched_tokens=16)
    driver.schema(LONG, encode=False)
    first = driver.request(LONG.prompt().use("a").text("Well?"), 1, reuse="anchored")
    driver.run(first)
    shared, whole = len("The first module goes on"), len(first.ids)
    others = [driver.request(LONG.prompt().use("b").text(text), 1, reuse="anchored") for text in ("Well?", "Go on?")]
    driver.run(*others)
    shared += len("In front. ")
    assert [request.usage.cached_tokens for request in others] == [shared, len(others[1].ids) - len("Go on?")]
    assert sum(driver.passes) == whole + len(others[0].ids) - shared + len("Go on?")
    assert driver.all_free()


def test_modules_are_found_in_any_combination_and_order():
    driver = Driver()
    driver.schema(SCHEMA)
    for names in itertools.permutations("abc", 2):
        request = driver.request(prompt_of("".join(names)), 3)
        driver.run(request)
        assert request.usage.computed_tokens == len("What of it?")
