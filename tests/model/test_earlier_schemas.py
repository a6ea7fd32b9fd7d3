"""Evicting a schema as erasure: earlier versions go too, whether replaced, laid out again or from before a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay import LLM, ParameterError, Schema
from tests.model.families.configs import tiny
from tests.model.test_store import GREEDY, files
from tests.raising import raises

CONFIDENTIAL = "Miami has beaches, and a report that nobody may read any more. "
EARLIER = Schema.from_string(
    f'<schema name="s">Always here, as it once was. <module name="a">{CONFIDENTIAL * 2}</module>'
    '<module name="b">A second module, which has the same text in both.</module></schema>'
)
LATER = Schema.from_string(
    '<schema name="s">Always here, as it is now. <module name="b">A second module, which has the same text in both.'
    "</module></schema>"
)
OTHER = Schema.from_string(
    '<schema name="t">This is another schema. <module name="c">Of which all stays stored.</module></schema>'
)
BOTH, OF_OTHER = EARLIER.prompt().use("a").use("b").text("Well?"), OTHER.prompt().use("c").text("Well?")
MODELS = [("llama", "exact"), ("llama", "modular"), ("llama", "isolated"), ("qwen3_5_text", "exact")]


def make(store: Path | str, model: str) -> LLM:
    return LLM(tiny(model), store=store, kv_memory="16MiB", chunk_size=8, seed=0)


def cached(llm: LLM, prompt: object, reuse: str, **asked: object) -> int:
    (output,) = llm.generate(prompt, GREEDY, reuse=reuse, **asked)
    return output.usage.cached_tokens


@pytest.mark.parametrize(("model", "reuse"), MODELS)
@pytest.mark.parametrize("salt", [None, "mine"])
def test_earlier_schema_is_evicted_with_its_replacement(tmp_path, model, reuse, salt):
    llm = make(tmp_path, model)
    for schema in (EARLIER, OTHER):
        llm.add_schema(schema, encode=False, cache_salt=salt)
    for _ in range(2):
        cached(llm, BOTH, reuse, cache_salt=salt)
        others = cached(llm, OF_OTHER, reuse, cache_salt=salt)
    assert cached(llm, BOTH, reuse, cache_salt=salt) > 100
    llm.add_schema(LATER, replace=True, encode=False, cache_salt=salt)
    assert llm.evict("s", cache_salt=salt) > 100
    llm.add_schema(EARLIER, replace=True, encode=False, cache_salt=salt)
    assert cached(llm, BOTH, reuse, cache_salt=salt) == 0
    assert cached(llm, OF_OTHER, reuse, cache_salt=salt) == others > 10, "another schema stays"
    llm.shutdown()


@pytest.mark.parametrize(("model", "reuse"), MODELS[1:])
def test_files_of_an_earlier_process_and_an_earlier_schema_are_removed(tmp_path, model, reuse):
    for schema, ends in ((EARLIER, False), (LATER, True)):
        llm = make(tmp_path, model)
        llm.add_schema(schema, encode=False)
        for _ in range(2):
            cached(llm, schema.prompt().use("b").text("Well?"), reuse)
            if not ends:
                cached(llm, BOTH, reuse)
        if ends:
            assert len(files(tmp_path)) > 1
            llm.evict("s", reuse=reuse)
        llm.shutdown()
    assert files(tmp_path) == []


def test_evicting_a_module_evicts_its_earlier_versions(tmp_path):
    llm = make(tmp_path, "llama")
    llm.add_schema(EARLIER)
    llm.add_schema(Schema.from_string(EARLIER.to_pml().replace("Miami", "Boston")), replace=True)
    llm.evict("s", modules=["a"])
    llm.add_schema(EARLIER, replace=True, encode=False)
    stored = llm.stored("s")
    assert stored["a"][1] == 0
    assert stored["b"][1] == stored["b"][0] > 0
    llm.shutdown()


@pytest.mark.parametrize("reuse", ["exact", "modular"])
def test_running_request_on_a_replaced_schema_leaves_nothing(reuse):
    llm = make("off", "llama")
    llm.add_schema(EARLIER, encode=False)
    running = llm.stream(BOTH, GREEDY, reuse=reuse)
    next(running)
    llm.add_schema(LATER, replace=True)
    llm.evict("s")
    assert list(running)[-1].finished
    llm.add_schema(EARLIER, replace=True, encode=False)
    assert cached(llm, BOTH, reuse) == 0
    llm.shutdown()


def test_public_and_private_schemas_of_one_name_are_evicted_separately():
    """A salt never means the public schema, not even after its own schema has been removed."""
    llm = make("off", "llama")
    for salt in (None, "mine"):
        llm.add_schema(EARLIER, cache_salt=salt)
    llm.evict("s", cache_salt="mine")
    assert sum(stored for _, stored in llm.stored("s", cache_salt="mine").values()) == 0
    llm.add_schema(EARLIER, cache_salt="mine")
    llm.remove_schema("s", cache_salt="mine")
    assert llm.evict("s", modules=["a"], cache_salt="mine") > 0
    assert llm.evict("s", cache_salt="mine") > 0
    for salt in ("mine", "another"):
        with raises("schema.unknown", ParameterError):
            llm.evict("s", cache_salt=salt)
    assert all(tokens == stored > 0 for tokens, stored in llm.stored("s").values())
    llm.shutdown()


@pytest.mark.parametrize(("model", "reuse"), MODELS)
@pytest.mark.parametrize("salt", [None, "mine"])
def test_text_of_a_removed_schema_is_evicted_by_its_name(tmp_path, model, reuse, salt):
    llm = make(tmp_path, model)
    for schema in (EARLIER, OTHER):
        llm.add_schema(schema, encode=False, cache_salt=salt)
    for _ in range(2):
        cached(llm, BOTH, reuse, cache_salt=salt)
        others = cached(llm, OF_OTHER, reuse, cache_salt=salt)
    llm.remove_schema("s", cache_salt=salt)
    with raises("schema.unknown", ParameterError):
        llm.evict("s", cache_salt="another")
    assert llm.evict("s", cache_salt=salt) > 100
    with raises("schema.unknown", ParameterError):
        llm.evict("s", cache_salt=salt)
    llm.add_schema(EARLIER, encode=False, cache_salt=salt)
    assert cached(llm, BOTH, reuse, cache_salt=salt) == 0
    assert cached(llm, OF_OTHER, reuse, cache_salt=salt) == others > 10, "another schema stays"
    llm.shutdown()


def test_module_of_a_removed_schema_is_evicted_by_its_name():
    llm = make("off", "llama")
    llm.add_schema(EARLIER)
    llm.remove_schema("s")
    assert llm.evict("s", modules=["a"]) > 0
    llm.add_schema(EARLIER, encode=False)
    stored = llm.stored("s")
    assert stored["a"][1] == 0
    assert stored["b"][1] == stored["b"][0] > 0
    llm.shutdown()


def test_empty_name_evicts_nothing():
    llm = make("off", "llama")
    llm.add_schema(EARLIER)
    with raises("schema.unknown", ParameterError):
        llm.evict("")
    assert all(tokens == stored > 0 for tokens, stored in llm.stored("s").values())
    llm.shutdown()


@pytest.mark.parametrize(("model", "reuse"), MODELS[1:])
def test_files_of_an_earlier_process_are_evicted_by_the_name_of_their_schema(tmp_path, model, reuse):
    llm = make(tmp_path, model)
    llm.add_schema(EARLIER, encode=False)
    for _ in range(2):
        cached(llm, BOTH, reuse)
    llm.shutdown()
    assert files(tmp_path)
    llm = make(tmp_path, model)
    assert llm.evict("s") > 100
    llm.shutdown()
    assert files(tmp_path) == []


@pytest.mark.parametrize("first", ["schema", "message", "schema, then a new process"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("salt", [None, "mine"])
def test_text_that_was_stored_by_another_name_first_is_evicted(tmp_path, salt, ends, first):
    """Equal text is one segment. It belongs to each schema that has it, also after a restart."""
    other = Schema.from_string(f'<schema name="t"><module name="c">{CONFIDENTIAL * 2}</module></schema>')
    mine = Schema.from_string(f'<schema name="s"><module name="a">{CONFIDENTIAL * 2}</module></schema>')
    options = {"reuse": "isolated", "cache_salt": salt}

    def process() -> LLM:
        return LLM(tiny("llama"), store=tmp_path, store_private=True, kv_memory="16MiB", chunk_size=8, seed=0)

    llm = process()
    if first == "message":
        part = {"type": "text", "text": CONFIDENTIAL * 2, "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "Well?"}]}]
        assert [cached(llm, [messages], **options) > 100 for _ in range(2)] == [False, True]
    else:
        llm.add_schema(other, **options)
        llm.remove_schema("t", cache_salt=salt)
    if "process" in first:
        llm.shutdown()
        llm = process()
    llm.add_schema(mine, **options)
    assert cached(llm, mine.prompt().use("a").text("Well?"), **options) > 100, "it was stored already"
    if ends:
        llm.shutdown()
        llm = process()
    llm.add_schema(LATER, replace=True, encode=False, **options)
    assert llm.evict("s", **options) > 100
    llm.add_schema(mine, replace=True, encode=False, **options)
    assert cached(llm, mine.prompt().use("a").text("Well?"), **options) < 10
    llm.shutdown()
