"""Deviation profiles are made from stored text while the engine is idle, at no cost to requests."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inlay import LLM, AsyncLLM, ParameterError, SamplingParams, Schema
from inlay.engine import core
from inlay.engine.background import idle
from inlay.engine.background import profiler as profiler_module
from inlay.kv.identity import SegmentSpec
from tests.conftest import tiny
from tests.model.engine.driving import Driver, work_off
from tests.model.equivalence.oracle import PromptCacheOracle
from tests.raising import PanicException, raises

SCHEMA = Schema.from_string(
    '<schema name="s">In front of all. <module name="a">The first module of them, say.</module>'
    '<module name="b">The second one, which is longer.</module><module name="c">A third, at last.</module></schema>'
)
WORDS = {
    "": "In front of all. ",
    "a": "The first module of them, say.",
    "b": "The second one, which is longer.",
    "c": "A third, at last.",
}
MOVABLE = sum(len(words) for name, words in WORDS.items() if name)
ONE = SamplingParams(temperature=0, max_tokens=1)


def prompt(text: str = "Well?"):
    return SCHEMA.prompt().use("a").use("b").use("c").text(text)


def profiles_of(llm):
    """By module, where there is one."""
    known = llm.local.engine.kv_manager.profiles
    modules = llm.processor.schemas.module_specs("s", llm.policy("anchored"))
    return {name: known[spec.key] for name, (spec, *_) in modules.items() if spec.key in known}


def driver_for(**settings) -> Driver:
    driver = Driver(**settings)
    _, specs = driver.llm.schemas.add(SCHEMA, driver.llm.policy("anchored"))
    driver.encode(specs)
    driver.engine.profiler.add(specs)
    return driver


def test_deviation_of_each_token_is_measured():
    """Against the stock model: the module after its context, and after a sample of others as they are stored."""
    driver = driver_for(record=False)
    driver.engine.idle_step()
    work_off(driver.engine.profiler)
    found = profiles_of(driver.llm)
    assert set(found) == {"a", "b", "c"}  # nothing ever stands before the front
    oracle = PromptCacheOracle(driver.loaded)
    text = {name: list(driver.llm.encoder.text(words)) for name, words in WORDS.items()}
    front = list(zip(text[""], range(len(text[""])), strict=True))
    oracle.add_module([], front, 0)
    at = len(front)
    for name in ("a", "b"):  # the sample of the third: all others, in their order
        oracle.add_module(front, [(token, len(front) + n) for n, token in enumerate(text[name])], at)
        at += len(text[name])
    oracle.add_fresh(text["c"], at)
    alone = PromptCacheOracle(driver.loaded)
    alone.add_module([], front, 0)
    alone.add_fresh(text["c"], len(front))
    half = len(oracle.values) // 2
    moved = []
    for layer in range(half, len(oracle.values)):
        new, old = oracle.values[layer][-1][0], alone.values[layer][-1][0]
        size = old.pow(2).sum((0, 2)).sqrt().mean()
        moved.append((new - old).pow(2).sum((0, 2)).sqrt() / size)
    expected = torch.stack(moved).mean(0).numpy()
    np.testing.assert_allclose(found["c"].astype(np.float32), expected, rtol=2e-3)


def test_recomputation_uses_profiles_once_they_exist():
    driver = driver_for()
    before = driver.request(prompt(), reuse="anchored+profiled:0.3")
    driver.run(before)
    assert before.usage.linked_tokens == before.usage.recomputed_tokens > 0
    work_off(driver.engine.profiler)
    after = driver.request(prompt(), reuse="anchored+profiled:0.3")
    driver.run(after)
    assert (after.usage.linked_tokens, after.usage.recomputed_tokens) == (0, before.usage.recomputed_tokens)


def test_generate_makes_profiles_if_no_thread_does():
    llm = LLM(tiny("llama"), kv_memory="4MiB", seed=0)
    llm.add_schema(SCHEMA, reuse="anchored")
    assert llm.stats().profiled_tokens == 0
    (output,) = llm.generate(prompt(), ONE, reuse="anchored+profiled:0.3")
    assert (output.usage.linked_tokens, output.usage.recomputed_tokens) == (0, round(0.3 * 49))
    stats = llm.stats()
    assert stats.profiled_tokens == MOVABLE
    assert stats.profile_s > 0
    llm.generate(prompt("And?"), ONE, reuse="anchored+profiled:0.3")
    assert llm.stats().profiled_tokens == stats.profiled_tokens


def test_deviations_are_reported_per_module():
    llm = LLM(tiny("llama"), kv_memory="4MiB", seed=0)
    llm.add_schema(SCHEMA, reuse="anchored")
    found = llm.deviations("s", reuse="anchored")
    assert list(found) == ["a", "b", "c"]
    assert min(found.values()) > 0
    assert found["a"] == pytest.approx(float(profiles_of(llm)["a"].astype(np.float32).mean()))
    llm.add_schema(Schema.from_string('<schema name="t"><module name="a">Other words.</module></schema>'), encode=False)
    assert llm.deviations("t") == {}
    assert llm.deviations("s", reuse="exact") == {}


def test_profile_off_makes_no_profiles():
    llm = LLM(tiny("llama"), kv_memory="4MiB", seed=0, profile="off")
    llm.add_schema(SCHEMA)
    (output,) = llm.generate(prompt(), ONE, reuse="anchored+profiled:0.3")
    assert output.usage.linked_tokens == output.usage.recomputed_tokens > 0
    assert llm.stats().profiled_tokens == 0
    with raises("parameter.unknown_choice", ParameterError, names="profile"):
        LLM(tiny("llama"), profile="some")


def test_engine_thread_makes_profiles_while_idle():
    async def run() -> int:
        llm = AsyncLLM(tiny("llama"), kv_memory="4MiB", seed=0)
        try:
            await llm.add_schema(SCHEMA, reuse="anchored")
            while llm.stats().profiled_tokens < MOVABLE:
                await asyncio.sleep(0.01)
            outputs = [each async for each in llm.generate(prompt(), ONE, reuse="anchored+profiled:0.3")]
            return outputs[-1].usage.linked_tokens
        finally:
            llm.shutdown()

    assert asyncio.run(asyncio.wait_for(run(), 60)) == 0


def test_new_request_finds_all_memory_free():
    """A new request ends the profiling pass, which releases all its memory."""
    driver = driver_for()
    used = driver.store.pool.free_chunks
    assert driver.engine.profiler.step(3)
    assert driver.store.pool.free_chunks < used
    request = driver.request(prompt(), reuse="anchored")
    driver.run(request)
    assert request.usage.computed_tokens == len("Well?")
    assert work_off(driver.engine.profiler) > 3
    assert len(profiles_of(driver.llm)) == 3
    assert driver.all_free()


def test_profiling_a_full_pool_evicts_the_oldest_segments():
    """A pool is full in the end, and stays so: profiles would never be made. Modules that they are made of stay."""
    driver = driver_for(kv_tokens=320)
    for number in range(12):
        driver.run(driver.request(list(range(20 * number, 20 * number + 20)), 4, reuse="exact"))
    pool = driver.store.pool
    assert pool.free_chunks * pool.chunk_size < min(len(WORDS[name]) for name in "abc")
    work_off(driver.engine.profiler)
    assert set(profiles_of(driver.llm)) == {"a", "b", "c"}
    assert pool.free_chunks * pool.chunk_size <= 320 // 8 + pool.chunk_size
    assert driver.all_free()


def test_module_too_long_for_profiling_does_not_block_others(monkeypatch):
    monkeypatch.setattr(profiler_module, "POOL_SHARE", 11)  # 29 tokens of it
    driver = driver_for(kv_tokens=320)
    for number in range(12):
        driver.run(driver.request(list(range(20 * number, 20 * number + 20)), 4, reuse="exact"))
    for _ in range(3):  # each of them is tried
        work_off(driver.engine.profiler)
    assert set(profiles_of(driver.llm)) == {"c"}, "the others are longer"
    for segment in driver.store.next_to_go(10):
        driver.store.discard([segment])
    work_off(driver.engine.profiler)
    assert set(profiles_of(driver.llm)) == {"a", "b", "c"}


def test_evicted_modules_are_not_profiled():
    driver = driver_for()
    driver.store.clear()
    assert not driver.engine.idle_step()
    assert not profiles_of(driver.llm)


def test_interrupted_profiling_yields_to_other_modules():
    """A long module that never has the time it needs does not keep the others from theirs."""
    driver = Driver()
    schema = Schema.from_string(
        f'<schema name="s"><module name="long">{"a long one " * 20}</module><module name="b">The second one.</module>'
        '<module name="c">A third, at last.</module></schema>'
    )
    _, specs = driver.llm.schemas.add(schema, driver.llm.policy("anchored"))
    driver.encode(specs)
    driver.engine.profiler.add(specs)
    for _ in range(4):  # of idle time there is too little for the long one, each time
        driver.engine.profiler.step(20)
        driver.engine.profiler.give_up()
    assert {"b", "c"} <= set(profiles_of(driver.llm))
    work_off(driver.engine.profiler)
    assert set(profiles_of(driver.llm)) == {"long", "b", "c"}
    assert driver.all_free()


def test_modules_waiting_for_profiles_are_bounded_in_tokens(monkeypatch):
    """Of requests that bring their own text those that wait for longest are forgotten, however few there are."""
    monkeypatch.setattr(profiler_module, "MOST_WAITING_TOKENS", 3 * MOVABLE)
    driver = driver_for()
    _, specs = driver.llm.schemas.add(SCHEMA, driver.llm.policy("anchored"))
    batches = []
    for number in range(4):
        schema = Schema.from_string(
            f'<schema name="n{number}">'
            + "".join(f'<module name="{name}">{words[:-1]}{number}</module>' for name, words in WORDS.items() if name)
            + "</schema>"
        )
        _, specs = driver.llm.schemas.add(schema, driver.llm.policy("anchored"))
        driver.encode(specs)
        batches.append(specs)
        driver.engine.profiler.add(specs)
    work_off(driver.engine.profiler)
    known = driver.engine.kv_manager.profiles
    assert [sum(spec.key in known for spec in specs) for specs in batches] == [0, 3, 3, 3]
    assert not profiles_of(driver.llm), "they had waited for longest"


def test_one_schema_may_exceed_the_profile_queue(monkeypatch):
    monkeypatch.setattr(profiler_module, "MOST_WAITING_TOKENS", MOVABLE - 1)
    driver = driver_for()
    for name in ("first", "last"):
        long = f"{name}, a module {'of it ' * 20}"
        schema = Schema.from_string(
            f'<schema name="{name}"><module name="a">{long}</module><module name="b">{name}, b.</module></schema>'
        )
        _, specs = driver.llm.schemas.add(schema, driver.llm.policy("anchored"))
        driver.encode(specs)
        driver.engine.profiler.add(specs)
    assert sum(len(spec.ids) for spec in specs) >= MOVABLE
    work_off(driver.engine.profiler)
    assert all(spec.key in driver.engine.kv_manager.profiles for spec in specs)


def repeated(driver: Driver, number: int) -> list[SegmentSpec]:
    """Return segments of three texts that are not stored."""
    written = "".join(f'<module name="{name}">{words[:-1]}{number}</module>' for name, words in WORDS.items() if name)
    schema = Schema.from_string(f'<schema name="r{number}">{written}</schema>')
    return driver.llm.schemas.add(schema, driver.llm.policy("anchored"))[1]


def test_found_text_is_stored_with_profiles_in_idle_time(monkeypatch):
    monkeypatch.setattr(profiler_module, "MOST_FOUND_TOKENS", 3 * MOVABLE)
    driver = Driver()
    profiler, texts = driver.engine.profiler, [repeated(driver, number) for number in range(4)]
    for specs in texts[:3]:
        profiler.encode(specs, specs, "a")
    profiler.encode(texts[3], texts[3], "a")  # too much of this salt waits
    work_off(driver.engine.profiler)
    for specs, stored in zip(texts, (True, True, True, False), strict=True):
        assert [driver.store.get(spec) is not None for spec in specs] == [stored] * 3
        assert [spec.key in profiler.profiles for spec in specs] == [stored] * 3
    profiler.encode(texts[3], texts[3], "a")  # the others wait no more
    work_off(driver.engine.profiler)
    assert all(driver.store.get(spec) is not None for spec in texts[3])
    assert driver.all_free()


def test_queued_found_text_is_dropped_when_its_salt_is_evicted(monkeypatch):
    monkeypatch.setattr(profiler_module, "MOST_FOUND_TOKENS", MOVABLE)
    driver = Driver()
    profiler, texts = driver.engine.profiler, [repeated(driver, number) for number in range(3)]
    for specs, salt in zip(texts, ("a", "b"), strict=False):
        profiler.encode(specs, specs, salt)
    assert profiler.step(3)  # text of one of them is partly computed
    driver.engine.evict_texts("a")
    driver.engine.evict_texts("c")
    profiler.encode(texts[2], texts[2], "a")  # its queue has room again
    work_off(driver.engine.profiler)
    assert [driver.store.get(specs[0]) is not None for specs in texts] == [False, True, True]
    assert not profiler.wanted
    assert driver.all_free()


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_fault_ends_only_the_profile(monkeypatch, caplog, kind):
    driver = driver_for()

    def fault(*_):
        raise kind("a fault")

    monkeypatch.setattr(profiler_module, "deviation", fault)
    with caplog.at_level(logging.ERROR):
        work_off(driver.engine.profiler)
    assert "a profile could not be made" in caplog.text
    assert not profiles_of(driver.llm)
    driver.run(driver.request(prompt(), reuse="anchored+profiled:0.3"))
    assert driver.all_free()


def test_private_modules_are_profiled_per_salt():
    """A profile is found by the key of its segment, in which the owner's salt is."""
    llm = LLM(tiny("llama"), kv_memory="4MiB", seed=0)
    for salt in ("one", "two"):
        llm.add_schema(SCHEMA, cache_salt=salt)
    params = {"sampling_params": ONE, "reuse": "anchored+profiled:0.3"}
    llm.generate(prompt(), cache_salt="one", **params)
    known = llm.local.engine.kv_manager.profiles
    assert len(known) == 6  # three of each owner
    assert llm.stats().profiled_tokens == 2 * MOVABLE


def test_deviation_without_shifts_is_of_the_preceding_text():
    llm = LLM(tiny("gpt2"), kv_memory="4MiB", seed=0)
    llm.add_schema(SCHEMA)
    (output,) = llm.generate(prompt(), ONE, reuse="anchored+profiled:0.3")
    assert output.usage.linked_tokens == 0 < output.usage.recomputed_tokens
    known = llm.local.engine.kv_manager.profiles
    modules = llm.processor.schemas.module_specs("s", llm.policy("anchored"))
    assert modules["a"][0].key not in known  # whose place nothing else ever stands before
    assert known[modules["c"][0].key].any()


def part(text):
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [part(text) for name, text in WORDS.items() if name] + [part("Well?")]},
]


@pytest.mark.parametrize("salt", [None, "mine"])
def test_parts_of_messages_are_profiled_after_their_preceding_parts(salt):
    llm = LLM(tiny("llama"), kv_memory="4MiB", seed=0)
    asked = {"sampling_params": ONE, "reuse": "anchored+profiled:0.3", "cache_salt": salt}
    first, second = (llm.generate([CHAT], **asked)[0].usage for _ in range(2))
    assert first.linked_tokens == first.recomputed_tokens > 0
    assert second.linked_tokens == 0 < second.recomputed_tokens


def test_private_request_leaves_no_profile_of_public_modules():
    """A profile reveals which modules were used together, so that of public modules uses the schema alone."""
    llm = LLM(tiny("llama"), kv_memory="4MiB", seed=0)
    llm.add_schema(SCHEMA, encode=False)
    for salt in ("one", None, None):
        (output,) = llm.generate(prompt(), ONE, reuse="anchored+profiled:0.3", cache_salt=salt)
        known = llm.local.engine.kv_manager.profiles
        if salt:
            llm.local.finish_profiles()
            assert not known
    assert known
    assert output.usage.linked_tokens == 0


def test_profiles_are_made_between_requests_in_a_time_share(monkeypatch):
    """Each pass of requests takes a second of this clock, and so does each pass for a profile."""
    driver = driver_for(record=False, promotion_memory=0)
    clock = [0.0]
    monkeypatch.setattr(idle, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(core, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    ran, busy, run = [], [], driver.engine.runner.run

    def timed(*args, **kwargs):
        clock[0] += 1.0
        return run(*args, **kwargs)

    monkeypatch.setattr(driver.engine.runner, "run", timed)
    step = driver.engine.profiler.step
    monkeypatch.setattr(driver.engine.profiler, "step", lambda tokens: ran.append(tokens) or step(tokens))
    running = driver.request("Once", 400, reuse="off")
    driver.add(running)
    for _ in range(10):
        driver.engine.step()
    assert not ran, "nobody has asked for any yet"
    driver.add(driver.request(prompt(), 1, reuse="anchored+profiled:0.3"))
    while len(profiles_of(driver.llm)) < 2:  # the first of all stands where it was encoded
        driver.engine.step()
        busy.append(1)
    assert not running.finished
    # the most time a busy engine saves up; the length of a pass that may start with part of it
    saved_s, ahead_s = 0.5, 1.0
    assert len(ran) <= saved_s + ahead_s + len(busy) * idle.BUSY_SHARE / (1 - idle.BUSY_SHARE)
    asked = driver.request(prompt("And?"), 1, reuse="anchored+profiled:0.3")
    driver.add(asked)
    while not asked.finished:
        driver.engine.step()
    assert (asked.usage.linked_tokens, running.finished) == (0, False)
    driver.finish()
    assert driver.store.lent == 0
    assert driver.all_free()


def test_request_preempts_a_profile_for_memory():
    driver = driver_for(record=False, kv_tokens=400, promotion_memory=0)
    driver.engine.profiler.miss(*[[spec for segment in driver.store for spec in segment.specs.values()]] * 2)
    running = driver.request("Once", 60, reuse="off")
    driver.add(running)
    driver.engine.step()
    assert driver.engine.profiler.step(3)
    assert driver.store.lent > 0
    large = driver.request("x" * 300, 4, reuse="off")
    driver.add(large)
    while not large.finished:
        driver.engine.step()
    assert (large.error, len(large.token_ids)) == (None, 4)


def test_module_split_during_profiling_gets_its_profile(caplog):
    """Other modules that begin alike are stored meanwhile, and the store keeps the common beginnings once."""
    driver = driver_for(record=False)
    assert driver.engine.profiler.step(3)
    other = Schema.from_string(
        '<schema name="t">In front of all. <module name="a">The first other.</module>'
        '<module name="b">The second other.</module><module name="c">A third other.</module></schema>'
    )
    _, specs = driver.llm.schemas.add(other, driver.llm.policy("anchored"))
    before = len(list(driver.store))
    for spec in specs:
        slots = driver.store.allocate(len(spec.ids))
        driver.store.insert(spec, slots)
        driver.store.pool.free(slots)
    assert len(list(driver.store)) > before + len(specs) - 1, "none was cut"
    work_off(driver.engine.profiler)
    assert set(profiles_of(driver.llm)) == {"a", "b", "c"}
    assert "could not be made" not in caplog.text


def begun_again(folder, **settings) -> tuple[LLM, dict]:
    """A new process over one folder, and the profiles that it knows at its start."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, reuse="anchored", store=str(folder), **settings)
    llm.schemas.add(SCHEMA, llm.policy("anchored"))
    return llm, profiles_of(llm)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_profiles_survive_a_restart_beside_their_segments(tmp_path, codec):
    llm, found = begun_again(tmp_path, store_codec=codec)
    assert found == {}
    llm.add_schema(SCHEMA)
    llm.generate([prompt()], ONE, reuse="anchored", recompute="profiled:0.2")
    made = profiles_of(llm)
    llm.shutdown()
    llm, found = begun_again(tmp_path, store_codec=codec)
    assert set(made) == {"a", "b", "c"}
    assert set(found) == set(made)
    for name, profile in found.items():
        np.testing.assert_array_equal(profile, made[name])
    (output,) = llm.generate([prompt()], ONE, reuse="anchored", recompute="profiled:0.2")
    assert output.usage.recomputed_tokens > output.usage.linked_tokens
    llm.evict("s")
    llm.shutdown()
    _, found = begun_again(tmp_path, store_codec=codec)
    assert found == {}


def test_a_damaged_profile_is_not_read(tmp_path):
    llm, _ = begun_again(tmp_path)
    llm.add_schema(SCHEMA)
    llm.generate([prompt()], ONE, reuse="anchored", recompute="profiled:0.2")
    llm.shutdown()
    (index,) = tmp_path.glob("*/index.sqlite")
    with closing(sqlite3.connect(index)) as rows, rows:
        changed = rows.execute("UPDATE profiles SET deviations = zeroblob(length(deviations))").rowcount
    assert changed == 3
    _, found = begun_again(tmp_path)
    assert found == {}
