"""Evictions as erasure: no later request reads evicted text, whether stored or being computed at that moment."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from inlay import Schema
from inlay.engine.encoder import Encoding
from inlay.kv.identity import SegmentSpec
from tests.model.engine.driving import Driver

MODULES = {name: f"The text of module {name} has {number} words more. " for number, name in enumerate("abcd")}
SHARED = len("The text of module ")  # tokens of their common prefix
SCHEMA = Schema.from_string(
    '<schema name="s">'
    + "".join(f'<module name="{name}">{text}</module>' for name, text in MODULES.items())
    + "</schema>"
)


def driver_for(**settings: Any) -> Driver:
    return Driver(record=False, **({"promotion_memory": 0.25, "profile": "off"} | settings))


def asked(driver: Driver, names: str, question: str = "What?", tokens: int = 2, reuse: str = "modular") -> Any:
    prompt = SCHEMA.prompt()
    for name in names:
        prompt = prompt.use(name)
    return driver.request(prompt.text(question), tokens, reuse=reuse)


def ask(driver: Driver, *args: Any, **asks: Any) -> Any:
    request = asked(driver, *args, **asks)
    driver.run(request)
    return request


def specs_of(driver: Driver, names: str = "", reuse: str = "modular") -> list[SegmentSpec]:
    """All forms of some modules that prompts may be read from. Without names, also the primers."""
    schemas, policy = driver.llm.processor.schemas, driver.llm.policy(reuse)
    return schemas.every_spec(schemas.get("s"), policy, modules=tuple(names))


def listed(driver: Driver) -> set[bytes]:
    return {spec.key for spec in driver.engine.kv_manager.retention.modules()}


def stored(driver: Driver) -> int:
    return driver.llm.stats().stored_tokens


def test_modules_with_a_common_prefix_are_evicted_one_by_one():
    driver = driver_for()
    driver.schema(SCHEMA, reuse="isolated")
    specs = specs_of(driver, reuse="isolated")
    assert {spec.key for spec in specs} <= listed(driver)
    for number, spec in enumerate(sorted(specs, key=lambda spec: spec.key)):
        driver.engine.evict([spec])
        assert spec.key not in listed(driver)
        assert len(listed(driver)) == len(specs) - number - 1
    assert stored(driver) == 0
    assert driver.all_free()


def test_module_with_modules_encoded_after_it_is_evicted():
    driver = driver_for()
    driver.schema(Schema.from_string(SCHEMA.to_pml().replace('name="s">', 'name="s">Always here. ')), reuse="anchored")
    first, *others = sorted(specs_of(driver, "", reuse="anchored"), key=lambda spec: spec.before.tokens)
    assert all(first in spec.context for spec in others)
    driver.engine.evict([first])
    assert driver.store.longest(first).tokens == 0
    assert all(driver.store.get(spec) for spec in others)
    driver.engine.evict(others)
    assert stored(driver) == 0


def test_partly_discarded_module_is_listed_and_evicted():
    driver = driver_for()
    driver.schema(SCHEMA, reuse="isolated")
    spec = specs_of(driver, "a", reuse="isolated")[0]
    (*_, last) = driver.store.longest(spec).segments
    driver.store.discard([last])
    for other in specs_of(driver, "bcd", reuse="isolated"):
        driver.engine.evict([other])
    driver.engine.evict([spec])
    assert (stored(driver), listed(driver)) == (0, set())


def test_text_after_several_modules_is_evicted_with_each():
    driver = driver_for(promotion_memory=0)
    driver.schema(SCHEMA)
    ask(driver, "abc", "What do all of these say?")
    driver.engine.evict(specs_of(driver, "b"))
    again = ask(driver, "abc", "What do all of these say?")
    assert again.usage.exact_tokens <= len(specs_of(driver, "a")[0].ids), "the question is computed again"
    driver.engine.evict(specs_of(driver))
    assert stored(driver) == 0


@pytest.mark.parametrize("ttl", [None, "1h"])
def test_readers_of_an_evicted_module_store_nothing(ttl):
    """One request reads the module when it is evicted; others come while it still runs, one after the other."""
    driver = driver_for(promotion_memory=0)
    driver.llm.add_schema(SCHEMA, ttl=ttl)
    reading = asked(driver, "a", "x?", tokens=60)
    driver.add(reading)
    driver.step()
    driver.engine.evict(specs_of(driver, "a"))
    later = ask(driver, "a", "y?")
    assert later.usage.module_tokens <= SHARED, "no new request reads what was evicted"
    overlapping = asked(driver, "a", "z?", tokens=90)
    driver.add(overlapping)
    while not reading.finished:
        driver.step()
    assert driver.store.longest(specs_of(driver, "a")[0]).tokens <= SHARED
    driver.finish()
    driver.engine.evict(specs_of(driver))
    assert stored(driver) == 0
    assert driver.all_free()


def test_module_evicted_while_computed_is_not_stored():
    driver = driver_for(max_num_batched_tokens=16, prefill_chunk=16)
    driver.schema(SCHEMA, encode=False)
    request = asked(driver, "ab")
    driver.add(request)
    driver.step()
    assert request.prompt_left
    driver.engine.evict(specs_of(driver))
    driver.finish()
    assert stored(driver) == 0
    assert ask(driver, "ab").usage.cached_tokens == 0


def test_waiting_request_does_not_store_an_evicted_module():
    driver = driver_for(max_num_seqs=1)
    driver.schema(SCHEMA)
    first, second = driver.request("Once", 8, reuse="off"), asked(driver, "abc")
    driver.add(first)
    driver.add(second)
    driver.step()
    driver.engine.evict(specs_of(driver))
    driver.finish()
    assert second.finished
    assert stored(driver) == 0
    ask(driver, "abc")
    assert stored(driver) > 0, "a later request sends the text again"


def test_schema_evicted_while_encoded_stays_evicted():
    driver = driver_for(max_num_batched_tokens=16, prefill_chunk=16)
    _, specs = driver.llm.schemas.add(SCHEMA, driver.llm.policy())
    encoding = Encoding("a schema", tuple(specs))
    driver.engine.add(encoding)
    driver.step()
    driver.engine.evict(specs_of(driver))
    while not encoding.finished:
        driver.step()
    assert stored(driver) == 0


def test_evicted_promoted_combination_is_freed_when_its_reader_ends():
    driver = driver_for()
    driver.schema(SCHEMA)
    for question in "xy":
        ask(driver, "abc", question)
    while driver.engine.idle_step(whole=True):
        pass
    reading = asked(driver, "abc", "z", tokens=30)
    driver.add(reading)
    driver.step()
    assert reading.usage.promoted_tokens > 0
    driver.engine.evict(specs_of(driver, "abc"))
    driver.finish()
    while driver.engine.idle_step(whole=True):
        pass
    driver.engine.evict(specs_of(driver))
    assert stored(driver) == 0, "and what was asked for before is not encoded again"


def test_recomputed_tokens_and_profiles_are_evicted_with_their_module():
    driver = driver_for(profile="auto", promotion_memory=0)
    driver.schema(SCHEMA)
    driver.llm.local.profile(specs_of(driver, "abcd"))
    while driver.engine.idle_step(whole=True):
        pass
    assert len(driver.engine.kv_manager.profiles) > 0
    ask(driver, "abcd", reuse="modular+profiled:0.3")
    driver.engine.evict(specs_of(driver))
    assert stored(driver) == 0
    assert len(driver.engine.kv_manager.profiles) == 0


def test_evicted_text_is_in_no_memory():
    driver = driver_for(shadow=1.0, speculation="lookup")
    text = "A text that nobody may keep, of some forty tokens or more."
    marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    chat = [{"role": "user", "content": [marked, {"type": "text", "text": "And then?"}]}]
    for prompt, reuse in ((chat, "modular"), (text, "exact"), (chat, "modular"), (text, "modular+content")):
        driver.run(driver.request(prompt, 8, salt="one", reuse=reuse))
        driver.engine.idle_step()
    specs = [spec for spec in driver.engine.kv_manager.retention.modules() if spec.before.private]
    assert specs
    assert ids_in(driver.llm, driver.llm.encoder.text(text))
    driver.engine.evict(specs)
    driver.engine.evict_texts("one")
    driver.llm.processor.forget_texts("one")
    assert not ids_in(driver.llm, driver.llm.encoder.text(text))


def ids_in(llm: Any, ids: Sequence[int]) -> list[object]:
    """Return the objects that an LLM refers to, directly or not, with these token ids or their text."""
    text, seen, found, left = llm.tokenizer.decode(list(ids)), set[int](), list[object](), [llm]
    packed, numbers = np.asarray(ids, "<u4").tobytes(), tuple(ids)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | torch.nn.Module | torch.Tensor):
            continue
        seen.add(id(one))
        if isinstance(one, str):
            has = text in one
        elif isinstance(one, bytes | np.ndarray | array):
            raw = np.asarray(one).astype("<u4").tobytes() if isinstance(one, np.ndarray | array) else one
            has = packed in raw
        else:
            whole = isinstance(one, tuple | list) and len(one) >= len(ids) and all(type(each) is int for each in one)
            starts = [at for at, each in enumerate(one) if each == ids[0]] if whole else []
            has = any(tuple(one[at : at + len(ids)]) == numbers for at in starts)
            left += gc.get_referents(one)
        found += [one] if has else []
    return found


def test_evicting_a_salt_evicts_only_its_text():
    driver = driver_for()
    for salt in ("ann", "bob"):
        driver.run(driver.request("Some words that are no module at all", 2, reuse="exact", salt=salt))
    running = driver.request("Some more words that are no module", 20, reuse="exact", salt="ann")
    driver.add(running)
    driver.step()
    before = stored(driver)
    assert 0 < driver.engine.evict_texts("ann") < before
    driver.finish()
    for salt, known in (("ann", False), ("bob", True)):
        request = driver.request("Some words that are no module at all", 2, reuse="exact", salt=salt)
        driver.run(request)
        assert (request.usage.cached_tokens > 0) == known
