"""Retention by request: lifetimes of schemas and of text, pins, and evictions."""

from __future__ import annotations

import asyncio

import pytest

from inlay import AsyncLLM, CapacityError, ParameterError, Schema
from inlay.errors import PinError
from inlay.kv import lifetimes
from inlay.kv.lifetimes import BY_KEY
from tests.model.test_store import BOTH, GREEDY, SCHEMA, answer, files, make
from tests.raising import raises

DOCUMENT = "A document of some length. " * 8


def misses(llm, prompt=BOTH, **asked) -> dict[str, int]:
    return dict(answer(llm, prompt, **asked).usage.misses)


def encoded(llm) -> int:
    """How many tokens of the schema a request for it would recompute now."""
    before = llm.stats().encoded_tokens
    llm.add_schema(SCHEMA)
    return llm.stats().encoded_tokens - before


def crowd(llm, times: int = 12) -> None:
    """Fill the pool several times with other text."""
    for number in range(times):
        answer(llm, f"{number} of many texts that have nothing to do with that. " * 12)


# Lifetimes


def test_unread_schema_expires_after_its_lifetime(tmp_path, clock):
    llm = make(tmp_path)
    llm.add_schema(SCHEMA, ttl="5m")
    clock.advance(299)
    assert misses(llm) == {}
    clock.advance(299)
    assert misses(llm) == {}, "the count restarts with the prompt that read it"
    clock.advance(301)
    assert set(misses(llm)) == {"expired"}
    llm.shutdown()


def test_lifetime_of_unread_schema_starts_at_its_encoding(tmp_path, clock):
    llm = make(tmp_path)
    llm.add_schema(SCHEMA, ttl="5m")
    assert encoded(llm) == 0
    clock.advance(301)
    answer(llm, "Anything, since lifetimes are looked at when requests come.")
    assert encoded(llm) > 0
    llm.shutdown()


def test_longest_lifetime_of_equal_texts_counts(clock):
    llm = make("off")
    llm.add_schema(SCHEMA, ttl="1h")
    llm.add_schema(Schema.from_string(SCHEMA.to_pml().replace('name="s"', 'name="t"')), ttl="5m")
    clock.advance(3000)
    answer(llm, "Anything.")
    assert encoded(llm) == 0
    llm.shutdown()


def test_later_process_keeps_the_remaining_lifetime(tmp_path, clock):
    llm = make(tmp_path)
    llm.add_schema(SCHEMA, ttl="5m")
    llm.shutdown()
    later = make(tmp_path)
    later.add_schema(SCHEMA, encode=False)
    assert misses(later) == {}, "it comes from the folder"
    clock.advance(301)
    assert set(misses(later)) == {"expired"}
    later.shutdown()


def test_infinite_lifetime_outlives_all_others(clock):
    llm = make("off")
    llm.add_schema(SCHEMA, ttl="inf")
    llm.add_schema(SCHEMA, ttl="5m")
    clock.advance(1e7)
    assert misses(llm) == {}
    llm.shutdown()


def test_invalid_lifetime_is_rejected_before_the_schema_is_added():
    llm = make("off")
    with raises("parameter.invalid_lifetime", ParameterError, names="ttl"):
        llm.add_schema(SCHEMA, ttl="5 minutes")
    assert llm.schema("s") is None
    llm.shutdown()


@pytest.mark.parametrize("salt", [None, "mine"])
def test_schema_that_is_read_in_place_expires_with_its_text(clock, salt):
    """Under exact, each request restarts the lifetime of the schema's text, and no text of another schema ends."""
    llm = make("off")
    llm.add_schema(SCHEMA, encode=False, cache_salt=salt, ttl="5m")
    lasting = Schema.from_string('<schema name="t">Of other text. <module name="c">It has no end.</module></schema>')
    llm.add_schema(lasting, encode=False, cache_salt=salt)
    other = lasting.prompt().use("c").text("Well?")

    def cached(prompt=BOTH) -> int:
        return answer(llm, prompt, reuse="exact", cache_salt=salt).usage.cached_tokens

    for _ in range(2):
        whole, others = cached(), cached(other)
    assert min(whole, others) > 30
    clock.advance(299)
    assert cached() == whole
    clock.advance(299)
    assert cached() == whole, "it began anew with the prompt that read it"
    clock.advance(301)
    answer(llm, "Something else, since lifetimes are looked at when requests come.")
    assert cached(other) == others, "that schema has no lifetime"
    assert cached() == 0
    llm.shutdown()


@pytest.mark.parametrize("reuse", ["exact", "modular"])
def test_marked_part_expires_under_every_policy(clock, reuse):
    """Under exact the part is text of the prompt: text after it expires with it, and text before it stays."""
    llm = make("off")
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    parts = [{"type": "text", "text": "Some words before it. " * 4}, {"type": "text", "text": DOCUMENT} | mark]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What now?"}]}]
    first = answer(llm, messages, reuse=reuse).usage
    assert answer(llm, messages, reuse=reuse).usage.cached_tokens > 0.8 * first.prompt_tokens
    clock.advance(299)
    kept = answer(llm, messages, reuse=reuse).usage.cached_tokens
    assert kept > 0.8 * first.prompt_tokens
    clock.advance(301)
    after = answer(llm, messages, reuse=reuse).usage
    assert after.cached_tokens < 0.4 * first.prompt_tokens
    if reuse == "exact":
        assert after.cached_tokens > 10, "what stands before the part has no end"
    llm.shutdown()


@pytest.mark.parametrize(
    "recompute", ["linked:12", "linked:9999", "profiled:0.3", "profiled:1", "query:0.4", "blend:0.4"]
)
def test_recomputed_tokens_of_a_part_expire_with_it(clock, recompute):
    llm = make("off")
    messages = marked("Some words before it, of which there is no end. ", "@" * 80)
    (secret,) = set(llm.processor.encoder.text("@" * 4))

    def kept() -> int:
        return sum(segment.run.ids.count(secret) for segment in llm.local.store)

    usage = answer(llm, messages, reuse=f"modular+{recompute}").usage
    assert usage.recomputed_tokens > 10
    assert kept() >= 80, "the module and its recomputed tokens, which may be all of it"
    clock.advance(301)
    answer(llm, "Anything, since lifetimes are looked at when requests come.")
    assert kept() == 0
    llm.shutdown()


MARK = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}


def marked(*texts: str) -> list[dict[str, object]]:
    """A message of marked parts, and a question."""
    parts = [{"type": "text", "text": text} | MARK for text in texts]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What now?"}]}]


@pytest.mark.parametrize("reuse", ["exact", "modular"])
def test_lifetime_table_is_fair_between_salts(monkeypatch, clock, reuse):
    monkeypatch.setattr(lifetimes, "MOST_TOKENS", 3000)
    llm = make("off")
    kept = marked(DOCUMENT)
    answer(llm, kept, reuse=reuse, cache_salt="bob")
    before = answer(llm, kept, reuse=reuse, cache_salt="bob").usage.cached_tokens
    many = marked(*(f"{number} of many. " for number in range(60)))
    tokens = answer(llm, many, reuse=reuse, cache_salt="ann").usage.prompt_tokens
    answer(llm, "Anything, since lifetimes are looked at when requests come.")
    assert answer(llm, kept, reuse=reuse, cache_salt="bob").usage.cached_tokens == before > 100
    assert answer(llm, many, reuse=reuse, cache_salt="ann").usage.cached_tokens > 0.9 * tokens, "claims go, and no KV"
    clock.advance(301)
    assert answer(llm, kept, reuse=reuse, cache_salt="bob").usage.cached_tokens < 0.4 * before, "it ends when it should"
    llm.shutdown()


def test_parts_requested_again_outlive_the_prompt(clock):
    llm = make("off")
    shared, both = marked(DOCUMENT), marked(DOCUMENT, "Another document, which is of some more words. " * 8)
    tokens = answer(llm, both, reuse="exact").usage.prompt_tokens
    clock.advance(200)
    answer(llm, shared, reuse="exact")
    clock.advance(200)
    assert 100 < answer(llm, both, reuse="exact").usage.cached_tokens < 0.6 * tokens, "the second one alone is over"
    clock.advance(301)
    assert answer(llm, both, reuse="exact").usage.cached_tokens < 0.2 * tokens
    llm.shutdown()


# Pins


def test_pinned_modules_are_not_evicted(tmp_path):
    llm = make("off", kv_memory="512KiB", eviction="lru")
    llm.add_schema(SCHEMA, encode=False)
    taken = llm.pin("s")
    assert taken == llm.stats().pinned_bytes > 0
    crowd(llm)
    assert encoded(llm) == 0
    assert llm.unpin("s")
    assert not llm.unpin("s")
    assert llm.stats().pinned_bytes == 0
    crowd(llm)
    assert encoded(llm) > 0
    llm.shutdown()


def test_module_is_pinned_with_its_context():
    llm = make("off", kv_memory="512KiB", eviction="lru")
    llm.add_schema(SCHEMA)
    llm.pin("s", modules=["a"])
    crowd(llm)
    before = llm.stats().encoded_tokens
    answer(llm, BOTH)
    assert 0 < llm.stats().encoded_tokens - before < 80, "b is computed, and neither a nor what stands before both"
    llm.shutdown()


@pytest.mark.parametrize(
    ("asked", "settings"),
    [({"max_bytes": "1KiB"}, {}), ({}, {"pin_memory": 0.001})],
)
def test_pins_over_the_budget_are_rejected_without_effect(asked, settings):
    llm = make("off", **settings)
    llm.add_schema(SCHEMA)
    with raises("cache.pin_limit", CapacityError, names="48.0 KiB"):
        llm.pin("s", **asked)
    assert llm.stats().pinned_bytes == 0
    assert not llm.unpin("s")
    llm.shutdown()


def test_request_needing_pinned_memory_is_rejected_at_once():
    llm = make("off", kv_memory="256KiB", pin_memory=1.0)
    llm.add_schema(SCHEMA)
    llm.pin("s")
    whole = llm.store.pool.slots
    text = llm.tokenizer.decode(llm.tokenizer.encode("Some more text. " * whole)[: whole - 40])
    with raises("engine.kv_memory", CapacityError, names="pinned"):
        answer(llm, text)
    llm.unpin("s")
    assert answer(llm, text).outputs[0].token_ids
    llm.shutdown()


def test_removed_or_replaced_schema_keeps_no_pins():
    llm = make("off")
    for end in (lambda: llm.remove_schema("s"), lambda: llm.add_schema(OTHER, replace=True)):
        llm.add_schema(SCHEMA, replace=True)
        llm.pin("s")
        end()
        assert llm.stats().pinned_bytes == 0
    llm.shutdown()


def test_pins_of_several_tenants_are_counted_separately():
    async def main() -> None:
        llm = make("off", AsyncLLM)
        await llm.add_schema(SCHEMA)
        one = await llm.pin("s", tenant="one")
        assert await llm.pin("s", tenant="two", max_bytes=one) == one == llm.stats().pinned_bytes
        assert await llm.unpin("s", tenant="one")
        assert llm.stats().pinned_bytes == one
        assert await llm.unpin("s", tenant="two")
        assert llm.stats().pinned_bytes == 0
        llm.shutdown()

    asyncio.run(main())


def test_two_schemas_with_shared_segments_are_pinned_separately():
    llm = make("off")
    llm.add_schema(SCHEMA)
    one = llm.pin("s")
    for let_go in (lambda: llm.unpin("t"), lambda: llm.remove_schema("t"), lambda: llm.add_schema(THIRD, replace=True)):
        llm.add_schema(TWIN, replace=True)
        assert llm.pin("t", max_bytes=2 * one) > one, "what both share counts once"
        let_go()
        assert llm.stats().pinned_bytes == one
    assert llm.unpin("s")
    assert llm.stats().pinned_bytes == 0
    llm.shutdown()


def test_new_pin_replaces_the_old_one_unless_rejected():
    llm = make("off", pin_memory=0.03)
    llm.add_schema(SCHEMA)
    whole = llm.pin("s", max_bytes="49KiB")
    for asked in ({"max_bytes": 1}, {"max_bytes": whole - 1, "modules": ()}):
        with pytest.raises(PinError):
            llm.pin("s", **asked)
        assert (llm.stats().pinned_bytes, llm.schemas.has_pinned("s")) == (whole, True)
    part = llm.pin("s", modules=["a"], max_bytes=whole)
    assert part == llm.stats().pinned_bytes < whole
    other = llm.pin("s", modules=["b"], max_bytes=whole - 1)
    assert other == llm.stats().pinned_bytes < whole, "the budget does not count what goes"
    assert llm.unpin("s")
    assert llm.stats().pinned_bytes == 0
    llm.shutdown()


def test_cancelled_pin_leaves_nothing_pinned():
    async def main() -> None:
        llm = make("off", AsyncLLM)
        await llm.add_schema(SCHEMA)
        for steps in range(1, 8):
            await llm.pin("s", modules=["a"])
            asked = asyncio.create_task(llm.pin("s"))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            await llm.unpin("s")
            await llm.stored("s")  # the engine answers this after the earlier calls
            assert llm.stats().pinned_bytes == 0
        await asyncio.gather(llm.pin("s", modules=["a"]), llm.pin("s", modules=["b"]))
        assert await llm.unpin("s")
        await llm.stored("s")
        assert llm.stats().pinned_bytes == 0
        llm.shutdown()

    asyncio.run(main())


def test_pinned_segment_is_listed_before_it_is_encoded():
    llm = make("off")
    llm.add_schema(SCHEMA, encode=False)
    segments = llm.segments_of("s", (), None, None)
    assert set(llm.client.look(segments, "me").result()) == {None}
    llm.client.pin(segments, "me", BY_KEY).result()
    assert [(one.pinned, one.tiers) for one in llm.client.look(segments, "me").result()] == [(True, ())] * 3
    assert set(llm.client.look(segments, "you").result()) == {None}
    llm.add_schema(SCHEMA)
    assert [(one.pinned, one.tiers) for one in llm.client.look(segments, "me").result()] == [(True, ("pool",))] * 3
    llm.shutdown()


def test_evicted_module_is_not_pinned():
    llm = make("off")
    llm.add_schema(SCHEMA)
    whole = llm.pin("s")
    llm.evict("s", modules=["a"])
    assert 0 < llm.stats().pinned_bytes < whole
    assert not llm.schemas.has_pinned("s"), "the rest of it alone is"
    assert llm.unpin("s")
    assert llm.stats().pinned_bytes == 0
    assert llm.pin("s") == whole
    assert llm.schemas.has_pinned("s")
    llm.evict("s")
    assert llm.stats().pinned_bytes == 0
    assert not llm.schemas.has_pinned("s")
    assert not llm.unpin("s")
    llm.shutdown()


def test_pinned_text_outlives_its_lifetime(clock):
    llm = make("off")
    llm.add_schema(SCHEMA, ttl="5m")
    llm.pin("s")
    clock.advance(1000)
    assert misses(llm) == {}
    llm.unpin("s")
    clock.advance(1000)
    assert set(misses(llm)) == {"expired"}
    llm.shutdown()


# Evictions


def test_evicted_text_is_removed_everywhere_and_the_schema_stays(tmp_path):
    llm = make(tmp_path)
    llm.add_schema(SCHEMA)
    expected = answer(llm).outputs[0].token_ids
    assert llm.evict("s") == llm.stats().encoded_tokens + len("What then?") + GREEDY.max_tokens - 1
    output = answer(llm)
    assert (set(dict(output.usage.misses)), output.outputs[0].token_ids) == ({"evicted"}, expected)
    llm.evict("s")
    llm.shutdown()
    assert files(tmp_path) == []


SCAFFOLD = Schema.from_string(
    '<schema name="s">In front. <module name="a">The first module, which is long enough for a few chunks.</module>'
    '<module name="b">A second module, which the first one stands in front of.</module>'
    '<scaffold modules="a b"/></schema>'
)


@pytest.mark.parametrize("reuse", ["exact", "modular", "isolated"])
@pytest.mark.parametrize("modules", [(), ["a"]])
def test_text_of_a_schema_is_evicted_under_any_policy_and_in_any_form(reuse, modules):
    """Whatever policy stored it: a prompt reads no token of an evicted module, nor of text after it."""
    llm = make("off")
    llm.add_schema(SCAFFOLD, encode=False)
    prompt = SCAFFOLD.prompt().use("a").use("b").text("What then?")
    for asked in (prompt, SCAFFOLD.prompt().use("a").text("What then?")):
        for _ in range(2):
            answer(llm, asked, reuse=reuse)
            answer(llm, asked, reuse=reuse, cache_salt="whose")
    assert answer(llm, prompt, reuse=reuse).usage.cached_tokens > 60
    assert llm.evict("s", modules=modules) > 60
    others = SCAFFOLD.prompt().use("b").text("")
    left = len(answer(llm, others, reuse="off").prompt_token_ids) if modules else 0
    for salt in (None, "whose"):
        assert answer(llm, prompt, reuse=reuse, cache_salt=salt).usage.cached_tokens <= left
        llm.evict("s", modules=modules)
    llm.shutdown()


def test_evicting_a_module_keeps_text_without_it():
    llm = make("off", reuse="exact")
    schema = Schema.from_string(
        '<schema name="s"><module name="a">One of two modules.</module>'
        '<module name="b">The other one.</module></schema>'
    )
    llm.add_schema(schema, encode=False)
    with_a, with_b = (schema.prompt().use(module).text("What then?") for module in "ab")
    for prompt in (with_a, with_b):
        answer(llm, prompt)
    whole = answer(llm, with_b).usage
    llm.evict("s", modules=["a"])
    assert answer(llm, with_b).usage.cached_tokens == whole.cached_tokens > 10
    assert answer(llm, with_a).usage.cached_tokens == 0
    llm.shutdown()


def test_evicting_one_module_ignores_pins():
    llm = make("off")
    llm.add_schema(SCHEMA)
    llm.pin("s")
    tokens = llm.evict("s", modules=["a"])
    assert encoded(llm) == tokens > 0
    assert llm.evict("s", modules=["a"], reuse="isolated") == tokens
    llm.shutdown()


@pytest.mark.parametrize(
    ("name", "modules", "code"),
    [("t", (), "schema.unknown"), ("s", ["c"], "schema.unknown_module")],
)
def test_unknown_schema_or_module_is_neither_pinned_nor_evicted(name, modules, code):
    llm = make("off")
    llm.add_schema(SCHEMA, encode=False)
    for do in (llm.pin, llm.evict):
        with raises(code, ParameterError):
            do(name, modules=modules)
    with raises("cache.nothing_encoded", ParameterError):
        llm.pin("s", reuse="exact")
    llm.shutdown()


def test_evicted_segment_is_freed_when_its_reader_ends():
    async def main() -> None:
        llm = make("off", AsyncLLM)
        await llm.add_schema(SCHEMA)
        stream = llm.generate(BOTH, GREEDY)
        await anext(stream)
        assert await llm.evict("s") > 0
        answers = [output async for output in stream]
        assert answers[-1].finished
        await asyncio.sleep(1.1)  # until the segments that were read are checked again
        async for _ in llm.generate("Anything.", GREEDY):
            pass
        assert sum(stored for _, stored in (await llm.stored("s")).values()) == 0
        llm.shutdown()

    asyncio.run(main())


TWIN = Schema.from_string(
    SCHEMA.to_pml().replace('name="s"', 'name="t"').replace("</schema>", '<module name="c">Third.</module></schema>')
)
THIRD = Schema.from_string('<schema name="t"><module name="a">Something else.</module></schema>')
OTHER = Schema.from_string('<schema name="s"><module name="a">Something else.</module></schema>')
