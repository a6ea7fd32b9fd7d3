"""Promotion: text that is requested again is encoded exactly while the engine is idle, for the same scope only."""

from __future__ import annotations

import asyncio
import logging
import random
from itertools import islice, permutations

import pytest
import torch

from inlay import LLM, AsyncLLM, ParameterError, SamplingParams, Schema
from inlay.check.run import divergence
from inlay.engine.background import promoter
from inlay.engine.request import Request
from inlay.kv.identity import TokenRun
from inlay.kv.pool import PrefixMatch
from inlay.prompt.composed import CachedSpan
from inlay.types import Scope
from inlay_lab.eval.setting import Setting
from tests.conftest import tiny
from tests.model.engine.driving import Driver, check_stock, ids, prompt_of, work_off
from tests.model.hooks import failing
from tests.model.prompt.test_borders import prose
from tests.raising import PanicException, raises

SCHEMA = Schema.from_string(
    '<schema name="s">In front of all. <module name="a">The first module of them, say.</module>'
    '<module name="b">The second one, which is longer.</module><module name="c">A third, at last.</module>'
    '<module name="d">And one more.</module><scaffold modules="b d"/></schema>'
)
FIRST, SECOND, THIRD = (
    len(text) for text in ("The first module of them, say.", "The second one, which is longer.", "A third, at last.")
)
ALL = FIRST + SECOND + THIRD
PRIMED = len("The ")  # the primer and the first module begin with it, so its exact states are stored
ONE = SamplingParams(temperature=0, max_tokens=1)


def prompt(names: str, text: str = "Well?"):
    return prompt_of(SCHEMA, names, text)


def driver_for(**settings) -> Driver:
    driver = Driver(settings.pop("model", "llama"), **{"reuse": None, **settings})
    driver.schema(SCHEMA)
    return driver


def ask(driver: Driver, names: str, text: str = "Well?", **asked) -> Request:
    request = driver.request(prompt(names, text), **{"reuse": "modular", **asked})
    driver.run(request)
    assert request.error is None
    return request


def same(driver: Driver, one: Request, other: Request) -> None:
    """The logits agree within rounding: one driver computes in one pass the tokens that the other has stored."""
    assert torch.stack(driver.logits[one]).sub(torch.stack(driver.logits[other])).abs().max() < 1e-5


@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral"])
def test_repeated_combination_is_promoted_and_equals_full_prefill(model):
    driver = driver_for(model=model)
    modules = SECOND + THIRD if model == "gpt2" else ALL  # without shifts there is no primer, and the first is exact
    first = ask(driver, "abc")
    assert (first.usage.anchored_tokens, first.usage.promoted_tokens) == (modules, 0)
    assert not work_off(driver.engine.promoter), "it was asked for once"
    assert ask(driver, "abc", "And?").usage.module_tokens > 0
    assert work_off(driver.engine.promoter) > 2
    third = ask(driver, "abc", "So?")
    assert (third.usage.module_tokens, third.usage.promoted_tokens) == (0, modules)
    assert third.usage.computed_tokens == len("So?")
    check_stock(driver, third)
    assert driver.llm.stats().promoted_tokens == modules
    assert driver.llm.stats().promotion_s > 0
    assert not work_off(driver.engine.promoter)
    assert driver.all_free()


def test_shared_prefix_of_combinations_is_promoted_once():
    driver = driver_for()
    ask(driver, "abc")
    ask(driver, "abd")
    work_off(driver.engine.promoter)
    assert driver.llm.stats().promoted_tokens == FIRST + SECOND
    third = ask(driver, "abc")
    assert (third.usage.promoted_tokens, third.usage.anchored_tokens) == (FIRST + SECOND, THIRD)
    work_off(driver.engine.promoter)
    assert driver.llm.stats().promoted_tokens == ALL
    fourth = ask(driver, "abc")
    assert fourth.usage.module_tokens == 0
    check_stock(driver, fourth)


@pytest.mark.parametrize("reuse", ["anchored", "isolated", "modular+promote:off"])
def test_other_policies_read_their_own_form(reuse):
    """Their answers are reproducible: they do not depend on other requests (invariant 2)."""
    driver = driver_for()
    before = [ask(driver, "abc", reuse=reuse) for _ in range(2)][-1]
    for _ in range(3):
        ask(driver, "abc", "And?")
        work_off(driver.engine.promoter)
    after = ask(driver, "abc", reuse=reuse)
    form = "isolated_tokens" if reuse == "isolated" else "anchored_tokens"
    assert getattr(after.usage, form) == getattr(before.usage, form) == after.usage.module_tokens > 0
    assert after.usage.promoted_tokens == 0
    same(driver, before, after)


def test_requests_of_one_form_cause_no_promotion():
    driver = driver_for()
    for reuse in ("anchored", "modular+promote:off", "exact", "isolated"):
        for _ in range(3):
            ask(driver, "abc", reuse=reuse)
    assert not work_off(driver.engine.promoter)


def test_modular_without_promotion_equals_primed():
    driver = driver_for()
    one, other = (ask(driver, "abc", reuse=reuse) for reuse in ("primed", "modular+promote:off"))
    same(driver, one, other)


def test_exact_request_reads_no_approximation():
    """Invariant 3. With a public schema it reads no promoted form of another scope either."""
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    work_off(driver.engine.promoter)
    ask(driver, "abc")
    exact = ask(driver, "abc", reuse="exact")
    assert (exact.usage.module_tokens, exact.usage.computed_tokens) == (0, ALL - PRIMED + len("Well?"))
    check_stock(driver, exact)


@pytest.mark.parametrize(("whose", "others"), [("one", ("two", "")), ("", ("one",))])
def test_promotion_of_one_salt_is_invisible_to_others(whose, others):
    driver = driver_for()
    before = {other: ask(driver, "abc", "First?", salt=other) for other in others}
    for _ in range(2):
        ask(driver, "abc", salt=whose)
    work_off(driver.engine.promoter)
    assert ask(driver, "abc", salt=whose).usage.promoted_tokens == ALL
    for other in others:
        after = ask(driver, "abc", "Other?", salt=other)
        assert after.usage.cached_tokens == before[other].usage.cached_tokens
        assert after.usage.anchored_tokens == before[other].usage.anchored_tokens == ALL
        again = ask(driver, "abc", "First?", salt=other)
        same(driver, before[other], again)
    exact = ask(driver, "abc", "Exact?", salt=others[0], reuse="exact")
    assert exact.usage.computed_tokens == ALL - PRIMED + len("Exact?")


def test_salts_are_counted_separately():
    driver = driver_for()
    for salt in ("one", "two", ""):
        ask(driver, "abc", salt=salt)
    assert not work_off(driver.engine.promoter)


def test_private_schema_is_promoted_for_its_salt():
    driver = Driver()
    layout, specs = driver.llm.schemas.add(SCHEMA, driver.llm.policy(), Scope("one"))
    assert layout is not None
    driver.encode(specs)
    for _ in range(2):
        ask(driver, "abc", salt="one")
    work_off(driver.engine.promoter)
    third = ask(driver, "abc", salt="one")
    assert (third.usage.module_tokens, third.usage.promoted_tokens) == (0, ALL)
    check_stock(driver, third)


def test_nothing_is_promoted_while_requests_run():
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    long = driver.request(ids(20), 30, reuse="exact")
    driver.add(long)
    while driver.engine.busy:
        assert not driver.engine.idle_step()
        driver.step()
    assert driver.llm.stats().promoted_tokens == 0
    assert driver.engine.idle_step()
    assert driver.llm.stats().promoted_tokens > 0


def test_new_request_finds_all_memory_free():
    """A new request ends the promotion, which releases its slots and starts again later."""
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    used = driver.store.pool.free_chunks
    assert driver.engine.promoter.step(3)
    assert driver.store.pool.free_chunks < used
    ask(driver, "ab", reuse="anchored")
    assert work_off(driver.engine.promoter) > 3
    assert ask(driver, "abc").usage.module_tokens == 0
    assert driver.all_free()


def test_promotion_stays_within_its_memory_share():
    driver = driver_for(kv_tokens=2000, promotion_memory=0.1)
    stored = driver.store.tokens
    for names in islice(permutations("abcd", 3), 9):
        for _ in range(2):
            ask(driver, "".join(names), positions="packed")
        work_off(driver.engine.promoter)
        assert driver.engine.promoter.popularity.slots <= 200
    assert driver.store.tokens > stored
    last = ask(driver, "".join(names), positions="packed")
    assert last.usage.module_tokens == 0
    assert driver.all_free()


def short_modules(count: int) -> Schema:
    return Schema.from_string(
        '<schema name="short">'
        + "".join(f'<module name="m{number}">{number % 10}.</module>' for number in range(count))
        + "</schema>"
    )


def ask_for_all(driver: Driver, schema: Schema, names, **asked) -> Request:
    built = schema.prompt()
    for name in names:
        built = built.use(f"m{name}")
    request = driver.request(built.text("Well?"), **{"reuse": "modular", "positions": "packed", **asked})
    driver.run(request)
    return request


def test_many_short_modules_are_encoded_in_shared_chunks():
    """A place in the pool for each would be a whole chunk, and a pass, for two tokens."""
    driver = driver_for(kv_tokens=2000, promotion_memory=0.1, chunk_size=16)
    schema = short_modules(30)
    driver.schema(schema)
    rng, pool = random.Random(1), driver.store.pool
    for _ in range(8):
        names = rng.sample(range(30), 20)
        for _ in range(2):
            ask_for_all(driver, schema, names)
        free = pool.free_chunks
        assert work_off(driver.engine.promoter, 512) <= 2
        assert free - pool.free_chunks <= pool.chunks_for(20 * len("10.")) + 1
        assert ask_for_all(driver, schema, names).usage.module_tokens == 0
        assert driver.engine.promoter.popularity.slots <= 200
    assert driver.all_free()


def test_evicted_text_is_not_promoted():
    """Its text would be stored again, for as long as there is room."""
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    assert driver.engine.promoter.step(3)
    keys = frozenset(key for node in ask(driver, "ab").prompt.prefix.nodes for key in node.segments)
    driver.engine.promoter.forget_modules(keys)
    assert not work_off(driver.engine.promoter)
    assert driver.llm.stats().promoted_tokens <= 3
    for _ in range(2):  # the scope that sent it finds it again
        ask(driver, "abc")
    work_off(driver.engine.promoter)
    assert ask(driver, "abc").usage.module_tokens == 0


@pytest.mark.parametrize("tokens", [7, 512])
def test_parts_promoted_together_are_forgotten_separately(tokens):
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abcd")
    work_off(driver.engine.promoter, tokens)
    nodes = ask(driver, "abcd").prompt.prefix.nodes
    driver.engine.promoter.forget_modules(frozenset(nodes[2].segments) - {*nodes[1].segments})  # not the schema's label
    found = [driver.store.longest(node.run).tokens for node in nodes]
    assert found == [FIRST, SECOND, 0, 0], "what stands behind it goes with it"
    kept = FIRST + SECOND
    assert kept <= driver.engine.promoter.popularity.slots < kept + 2 * driver.store.pool.chunk_size
    assert driver.all_free()


def test_text_after_a_forgotten_module_is_not_counted():
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    work_off(driver.engine.promoter)
    promoted = driver.engine.promoter.popularity
    assert promoted.slots >= ALL
    (first, *_) = ask(driver, "abc").prompt.prefix.nodes
    driver.engine.promoter.forget_modules(frozenset(first.segments))
    assert promoted.slots == 0


def test_combination_larger_than_the_share_is_not_promoted():
    driver = driver_for(kv_tokens=2000, promotion_memory=0.02)
    for _ in range(3):
        ask(driver, "abc")
        work_off(driver.engine.promoter)
    assert ask(driver, "abc").usage.anchored_tokens > 0
    assert driver.llm.stats().promoted_tokens <= 40


def test_evicted_combination_is_promoted_again_on_request():
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    work_off(driver.engine.promoter)
    driver.store.clear()
    driver.schema(SCHEMA)
    for _ in range(4):
        assert ask(driver, "abc").usage.anchored_tokens == ALL
        work_off(driver.engine.promoter)
    assert ask(driver, "abc").usage.module_tokens == 0


def test_combinations_that_do_not_fit_stop_replacing_each_other():
    driver = driver_for(kv_tokens=1000, promotion_memory=0.08)  # too small for a primer, so a first module is exact
    both = (SECOND + THIRD) + (FIRST + SECOND)
    assert both > 0.08 * 1000
    spent = []
    for _ in range(40):
        before = driver.llm.stats().promoted_tokens
        for names in ("abc", "cab"):
            ask(driver, names, positions="packed")
            ask(driver, names, positions="packed")
            work_off(driver.engine.promoter)
        spent.append(driver.llm.stats().promoted_tokens - before)
    assert spent[0] == both
    assert sum(spent[1:]) < 7 * both, "each of 39 rounds encoded them again"


def test_repeatedly_evicted_combination_is_promoted_less_often():
    driver = driver_for()
    for _ in range(40):
        ask(driver, "abc")
        work_off(driver.engine.promoter)
        driver.store.clear()
        driver.schema(SCHEMA)
    assert driver.llm.stats().promoted_tokens <= 4 * ALL


def test_new_combination_replaces_an_unused_one():
    driver = driver_for(kv_tokens=1000, promotion_memory=0.1)
    for names in ("abc", "cab", "abc"):
        for _ in range(4):
            ask(driver, names, positions="packed")
            work_off(driver.engine.promoter)
        assert ask(driver, names, positions="packed").usage.module_tokens == 0


def test_clearing_the_store_forgets_all_combinations():
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    driver.llm.reset_prefix_cache()
    assert not work_off(driver.engine.promoter)


@pytest.mark.parametrize("promotion_memory", [0, 0.0])
def test_zero_share_disables_promotion(promotion_memory):
    driver = driver_for(promotion_memory=promotion_memory)
    for _ in range(3):
        ask(driver, "abc")
    assert driver.engine.promoter is None
    assert driver.llm.promote() == 0


@pytest.mark.parametrize("share", [-0.1, 1.5, "much", True])
def test_invalid_share_is_rejected(share):
    with raises("parameter.out_of_range", ParameterError, names="promotion_memory"):
        LLM(tiny("llama"), promotion_memory=share)


def test_preempted_request_keeps_its_composed_prompt_for_all_answers():
    driver = driver_for(kv_tokens=400, promotion_memory=0.5, max_model_len=320)  # so the primer is short
    for _ in range(2):
        ask(driver, "abc")
    work_off(driver.engine.promoter)
    late = driver.request(prompt("abc"), 60, reuse="modular", n=2, temperature=1.0, priority=1)
    driver.add(late)
    driver.step(2)
    chosen = late.prompt.composed
    assert late.usage.promoted_tokens == ALL
    driver.add(driver.request(ids(150), 120, reuse="exact"))
    while driver.engine.busy and not any(member.preemptions for member in late.family):
        driver.step()
    assert any(member.preemptions for member in late.family)
    driver.store.clear()  # the stored form may have been evicted
    driver.finish()
    assert all(member.prompt.composed is chosen for member in late.family)
    assert [(member.error, len(member.token_ids)) for member in late.family] == [(None, 60)] * 2


def test_only_tokens_that_are_not_exact_are_recomputed():
    driver = driver_for()
    for _ in range(2):
        before = ask(driver, "abc", reuse="modular+linked:5")
    assert before.usage.recomputed_tokens == 15
    work_off(driver.engine.promoter)
    after = ask(driver, "abc", reuse="modular+linked:5")
    assert (after.usage.recomputed_tokens, after.usage.module_tokens) == (0, 0)
    longer = ask(driver, "abcd", reuse="modular+linked:5")
    assert (longer.usage.recomputed_tokens, longer.usage.promoted_tokens) == (5, ALL)


def test_usage_counts_each_form():
    driver = driver_for()
    scaffold = ask(driver, "abd").usage  # computes them together
    scaffold = ask(driver, "abd", "And?").usage
    assert scaffold.scaffold_tokens > 0
    for text in ("So?", "Well?"):
        anchored, isolated = (ask(driver, "bc", text, reuse=reuse).usage for reuse in ("anchored", "isolated"))
    assert (anchored.scaffold_tokens, anchored.isolated_tokens) == (0, 0)
    assert anchored.anchored_tokens == anchored.module_tokens > 0
    assert (isolated.scaffold_tokens, isolated.anchored_tokens) == (0, 0)
    assert isolated.isolated_tokens == isolated.module_tokens > 0


def part(text: str, *, marked: bool = True):
    return {"type": "text", "text": text} | ({"cache_control": {"type": "ephemeral"}} if marked else {})


def chat(*parts):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]


def test_parts_of_messages_are_promoted():
    driver = Driver()
    texts = ("A document of some length.", "Another one, no shorter than that.")

    def asked(question: str) -> Request:
        request = driver.request(chat(*map(part, texts), part(question, marked=False)), reuse="modular")
        driver.run(request)
        return request

    assert asked("One?").usage.computed_tokens > 0
    assert asked("Two?").usage.anchored_tokens > 0
    work_off(driver.engine.promoter)
    healed = asked("Three?")
    assert healed.usage.module_tokens == 0
    assert healed.usage.promoted_tokens >= len(texts[1])
    check_stock(driver, healed)


def test_part_inside_a_stored_segment_is_promoted_once():
    """A request without modules stores its text as one segment, across the border where the found part begins."""
    driver = Driver()
    document = prose(1, 12)
    for front in ("Behind this.", "And behind that."):
        driver.run(driver.request(f"{front}\n\n{document}", reuse="modular+content"))
    half = f"In front.\n\n{document[: len(document) // 2]}"
    driver.run(driver.request(half, reuse="exact"))
    for question in ("One?", "Two?", "Three?"):
        driver.run(driver.request(f"In front.\n\n{document}\n\n{question}", reuse="modular+content"))
        work_off(driver.engine.promoter)
        driver.audit()
    assert driver.llm.stats().promoted_tokens
    promoted = driver.request(f"In front.\n\n{document}\n\nFour?", reuse="modular+content")
    driver.run(promoted)
    assert promoted.usage.module_tokens == 0
    assert promoted.usage.computed_tokens < 10
    check_stock(driver, promoted)


def test_conversation_prefers_its_history_to_a_separate_part():
    """The history was computed in place, so it is exact."""
    driver = Driver()
    document = "A document that nobody marks in this conversation."
    turn = chat(part("About this:"), part(document, marked=False), part("Well?", marked=False))
    first = driver.request(turn, reuse="modular")
    driver.run(first)
    driver.run(driver.request(chat(part(document)), reuse="modular"))  # another request marks it
    again = driver.request(turn, reuse="modular")
    driver.run(again)
    assert again.usage.module_tokens == 0
    assert again.usage.computed_tokens == 1
    check_stock(driver, again)


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_fault_ends_only_the_promotion(caplog, kind):
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")

    with failing(driver.loaded, kind("a fault")), caplog.at_level(logging.ERROR):
        assert driver.engine.idle_step()
        assert not driver.engine.idle_step()
    assert "could not be encoded" in caplog.text
    assert ask(driver, "abc").usage.anchored_tokens > 0
    assert driver.all_free()


def test_fault_keeps_earlier_promotions():
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    work_off(driver.engine.promoter)
    before = driver.engine.promoter.popularity.slots
    for _ in range(2):
        ask(driver, "dca")
    with failing(driver.loaded, MemoryError()):
        assert driver.engine.promoter.step(3)
    assert driver.engine.promoter.popularity.slots == before > 0
    assert not work_off(driver.engine.promoter)
    assert ask(driver, "abc").usage.module_tokens == 0
    assert driver.all_free()


@pytest.mark.parametrize("where", ["allocation_of", "tail_tokens"])
def test_fault_while_evicting_leaves_no_references(monkeypatch, where):
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")

    def fault(*_):
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(promoter, where, fault)
        driver.engine.idle_step()
    driver.audit()
    assert driver.all_free()


def test_failed_insert_is_not_retried_forever(monkeypatch):
    """Two stored segments may conflict; see PrefixIndex.insert."""
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    computed = driver.llm.stats().promoted_tokens
    with monkeypatch.context() as patch:
        patch.setattr(driver.store, "insert", lambda run, slots: PrefixMatch(()))
        assert work_off_in(driver, 50)
    assert driver.llm.stats().promoted_tokens == computed + ALL
    for _ in range(2):
        ask(driver, "abc")
    assert work_off_in(driver, 50)
    assert ask(driver, "abc").usage.module_tokens == 0


def work_off_in(driver: Driver, steps: int) -> bool:
    """Whether idle time in so many steps is enough."""
    return any(not driver.engine.promoter.step(100) for _ in range(steps))


def test_eviction_for_promotion_spares_shared_tokens():
    """A request whose text starts like the evicted text stays, with the shared tokens."""
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    work_off(driver.engine.promoter)
    promoted = ask(driver, "abc")
    assert promoted.usage.module_tokens == 0
    (second, *_) = [node.run for node in promoted.prompt.prefix.nodes]
    again = TokenRun((*second.ids[:4], *driver.llm.encoder.text("xyz")), second.start, second.before)
    slots = driver.store.allocate(len(again.ids))
    driver.store.insert(again, slots)
    driver.store.pool.free(slots)
    keys = frozenset(key for node in promoted.prompt.prefix.nodes for key in node.segments)
    driver.engine.promoter.forget_modules(keys)
    assert driver.store.longest(second).tokens == 4
    assert driver.store.longest(again).tokens == len(again.ids)
    driver.audit()


def test_engine_thread_promotes_by_itself():
    async def run() -> tuple[int, ...]:
        llm = AsyncLLM(tiny("llama"), kv_memory="4MiB", seed=0)
        try:
            await llm.add_schema(SCHEMA)
            found = []
            for _ in range(3):
                outputs = [each async for each in llm.generate(prompt("abc"), ONE)]
                found.append(outputs[-1].usage.module_tokens)
                while len(found) == 2 and llm.stats().promoted_tokens < ALL:
                    await asyncio.sleep(0.01)
            return tuple(found)
        finally:
            llm.shutdown()

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (ALL, ALL, 0)


def test_repeated_documents_reach_full_prefill_after_few_requests():
    """On the model in the package: 6 documents of 12."""
    setting = Setting(reuse=("modular",), documents=6, questions=2, tasks=("count",))
    each = setting.rounds(6)[0]
    llm = LLM("demo", dtype="float32", kv_memory="64MiB", profile="off")
    llm.add_schema(each.schema(scaffolds=False))
    asked = each.prompt(each.cases[0])
    said = llm.generate([asked], SamplingParams(temperature=0, max_tokens=8), reuse="off")[0].outputs[0].token_ids
    (full,) = llm.distributions([asked], [said], reuse="off")
    found = []
    for _ in range(3):
        found.append(divergence(full, llm.distributions([asked], [said])[0]))
        llm.promote()
    assert min(found[:2]) > 1e-4
    assert found[2] < 1e-6


def test_interrupted_promotion_continues_where_it_stopped():
    """Else nothing long would ever come to its end where requests keep coming."""
    driver = driver_for()
    for _ in range(2):
        ask(driver, "abc")
    for number in range(20):
        driver.engine.promoter.step(8)
        ask(driver, "a", f"{number}?", reuse="anchored")  # cancels work in progress
    assert driver.llm.stats().promoted_tokens <= ALL + 8
    third = ask(driver, "abc")
    assert third.usage.module_tokens == 0
    check_stock(driver, third)


def test_one_salt_cannot_fill_the_tables(monkeypatch):
    monkeypatch.setattr(promoter, "MOST_NODES", 10)
    monkeypatch.setattr(promoter, "MOST_WAITING", 2 * (FIRST + SECOND))
    driver = driver_for()
    ask(driver, "ab", salt="one")
    for number, names in enumerate(islice(permutations("abcd", 3), 9)):
        for _ in range(2):
            ask(driver, "".join(names), f"{number}?", salt="two", positions="packed")
    ask(driver, "ab", salt="one")
    work_off(driver.engine.promoter)
    assert ask(driver, "ab", salt="one").usage.promoted_tokens == FIRST + SECOND


def test_one_time_salts_do_not_displace_promotions(monkeypatch):
    monkeypatch.setattr(promoter, "MOST_SALTS", 4)
    driver = driver_for()
    for _ in range(2):
        ask(driver, "ab", salt="one")
    work_off(driver.engine.promoter)
    for number in range(6):
        ask(driver, "ab", salt=f"once {number}")
    assert ask(driver, "ab", salt="one").usage.promoted_tokens == FIRST + SECOND


@pytest.mark.long
def test_many_combinations_in_a_small_pool_stay_correct():
    """Exact prompts agree with the stock model, and the accounting is consistent."""
    randomly, exact = random.Random(3), 0
    driver = driver_for(kv_tokens=400, promotion_memory=0.3, max_num_seqs=4, max_model_len=320)
    alive: list[Request] = []
    for _ in range(150):
        names = randomly.choice(["ab", "abc", "ba", "dca", "cab"])
        asked = {"reuse": randomly.choice(["modular", "modular", "modular+linked:3", "exact"])}
        salt = randomly.choice(["", "one"])
        text = randomly.choice(["What?", "Well, then?"])
        alive.append(driver.request(prompt(names, text), 3, salt=salt, positions="packed", **asked))
        driver.add(alive[-1])
        for _ in range(randomly.choice([0, 3, 30])):
            driver.step() if driver.engine.busy else driver.engine.promoter.step(randomly.choice([3, 40]))
        if randomly.random() < 0.1:
            driver.engine.release(alive.pop())
        for request in [one for one in alive if one.finished]:
            alive.remove(request)
            assert request.error is None
            approximate = any(isinstance(part, CachedSpan) and not part.exact for part in request.prompt.composed)
            if not approximate:
                check_stock(driver, request)
                exact += request.usage.promoted_tokens > 0
    driver.finish()
    assert exact > 3
    assert driver.llm.stats().promoted_tokens > 200
    driver.engine.promoter.give_up()
    assert not any(segment.holds for segment in driver.store)
    assert driver.all_free()
