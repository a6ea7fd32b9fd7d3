"""Encodings among requests: a module without room waits, a schema takes a share of the pool, and encoded modules
stay.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from inlay import CapacityError, Schema
from inlay.engine.encoder import Encoding
from tests.model.engine.driving import Driver, check_stock, ids
from tests.model.hooks import failing
from tests.raising import raises


def schema_of(modules: int, words: str = "abcdefgh", name: str = "s") -> Schema:
    """Modules of 42 or 43 tokens without context, each with its own beginning."""
    texts = "".join(f'<module name="m{n}">{n}{words * 5}.</module>' for n in range(modules))
    return Schema.from_string(f'<schema name="{name}">{texts}</schema>')


def encoding_of(driver: Driver, schema: Schema) -> Encoding:
    _, specs = driver.llm.schemas.add(schema, driver.llm.policy("isolated"))  # so that modules have no context
    return Encoding("a schema", tuple(specs))


def held_by(driver: Driver, encoding: Encoding) -> int:
    pool, allocation = driver.store.pool, encoding.allocation
    return len({chunk for slots in (allocation.modules, *allocation.hold.slots()) for chunk in pool.chunks_of(slots)})


def test_request_waits_for_an_encoding_that_fills_the_pool():
    driver = Driver(kv_tokens=512, chunk_size=16, max_num_batched_tokens=16)
    encoding, request = encoding_of(driver, schema_of(11)), driver.request(ids(490, 1), 3)
    driver.add(encoding)
    driver.step()
    driver.add(request)
    driver.step()
    assert driver.engine.scheduler.running == [encoding]
    driver.step(2)
    assert driver.engine.scheduler.running == [request], "it goes before the next batch"
    driver.finish()
    assert encoding.complete
    check_stock(driver, request)
    assert driver.all_free()


def test_encoding_waits_for_a_request_that_fills_the_pool():
    driver = Driver(kv_tokens=512, chunk_size=16)
    encoding, request = encoding_of(driver, schema_of(11)), driver.request(ids(480, 1), 20)
    driver.add(request)
    driver.step()
    driver.add(encoding)
    driver.step(5)
    assert encoding.done == 0
    assert driver.engine.scheduler.waiting == [encoding]
    driver.finish()
    assert (encoding.complete, encoding.done) == (True, encoding.total)
    check_stock(driver, request)
    assert driver.all_free()


def test_many_requests_and_encodings_in_a_small_pool_all_finish():
    randomly = random.Random(4)
    driver = Driver(kv_tokens=256, max_num_batched_tokens=24, max_num_seqs=3, record=False)
    asked: list = []
    for n in range(24):
        if randomly.random() < 0.3:
            asked.append(encoding_of(driver, schema_of(randomly.randrange(1, 6), "xyz" * (1 + n % 3), f"s{n}")))
        else:
            prompt = ids(randomly.randrange(1, 200), n)
            asked.append(driver.request(prompt, randomly.randrange(1, 40), priority=randomly.choice([0, 0, 1])))
        driver.add(asked[-1])
        driver.step(randomly.randrange(4))
    driver.finish()
    assert [each.error for each in asked] == [None] * 24
    assert driver.all_free()


def test_encoding_holds_a_bounded_share_of_the_pool():
    driver = Driver(kv_tokens=1024, chunk_size=16, max_num_batched_tokens=16, record=False)
    encoding = encoding_of(driver, schema_of(20))
    driver.add(encoding)
    most = 0
    while driver.engine.busy:
        driver.step()
        most = max(most, held_by(driver, encoding))
    assert encoding.complete
    assert all(driver.store.get(spec) for spec in encoding.specs)
    assert 0 < most <= driver.store.pool.chunks // 8


@pytest.mark.parametrize("ahead", [True, False])
def test_the_primer_is_computed_once_for_all_modules(ahead):
    """Encoded ahead, in several batches. Or by four requests at the same time, with three modules each."""
    driver = Driver(kv_tokens=2400, chunk_size=16, record=False, max_model_len=512)
    schema = schema_of(12)
    driver.schema(schema, encode=ahead, reuse="modular")
    if not ahead:
        names = [[f"m{number}" for number in range(first, first + 3)] for first in range(0, 12, 3)]
        prompts = [schema.prompt().use(a).use(b).use(c).text("?") for a, b, c in names]
        driver.run(*(driver.request(prompt, 1, reuse="modular") for prompt in prompts))
    primer = 512 // 8
    assert driver.llm.stats().encoded_tokens == primer + 10 * 42 + 2 * 43


def test_only_one_encoding_holds_memory_at_a_time():
    driver = Driver(kv_tokens=2048, chunk_size=16, max_num_batched_tokens=16, record=False)
    encodings = [encoding_of(driver, schema_of(8, words, words)) for words in ("ab", "cd", "ef")]
    driver.add(*encodings)
    while driver.engine.busy:
        driver.step()
        assert sum(held_by(driver, encoding) > 0 for encoding in encodings) <= 1
    assert all(encoding.complete for encoding in encodings)


def test_cancelled_encoding_keeps_finished_modules():
    driver = Driver(kv_tokens=1024, chunk_size=16, max_num_batched_tokens=50, record=False)
    encoding = encoding_of(driver, schema_of(20))
    driver.add(encoding)
    driver.step(6)
    driver.engine.release(encoding)
    stored = [driver.store.get(spec) is not None for spec in encoding.specs]
    assert stored == sorted(stored, reverse=True)
    assert 5 <= sum(stored) <= 7
    assert not driver.engine.busy
    driver.encode(encoding.specs)  # another continues from there
    assert all(driver.store.get(spec) for spec in encoding.specs)
    assert driver.all_free()


def test_schema_larger_than_the_pool_is_rejected_in_one_sentence():
    driver = Driver(kv_tokens=256)
    encoding = encoding_of(driver, schema_of(7))
    with raises("engine.kv_memory", CapacityError, names="294"):
        driver.add(encoding)
    assert not driver.engine.busy
    assert len(driver.store) == 0


def test_requests_and_encodings_share_passes_and_answers_stay_exact():
    driver = Driver(max_num_batched_tokens=64, prefill_chunk=16)
    request = driver.request(ids(20), 12)
    driver.add(request)
    driver.step()
    encoding = encoding_of(driver, schema_of(4))
    driver.add(encoding)
    driver.step()
    assert driver.passes == [20, 1 + 16]
    driver.finish()
    assert encoding.complete
    check_stock(driver, request)


def test_request_and_encoding_do_not_compute_the_same_module_twice():
    for first in ("request", "encoding"):
        driver = Driver(max_num_batched_tokens=16, reuse="isolated")
        schema = schema_of(2)
        encoding = encoding_of(driver, schema)
        request = driver.request(schema.prompt().use("m0").use("m1").text("?"), 2)
        pair = [request, encoding]
        driver.add(*(pair if first == "request" else pair[::-1]))
        driver.finish()
        assert encoding.complete
        assert sum(driver.passes) == 2 * 42 + 1 + 1  # both modules once, the question, and the first token generated
        assert driver.all_free()


def test_preempted_encoding_continues_afterwards():
    driver = Driver(kv_tokens=160, max_num_batched_tokens=4, chunk_size=4)
    request = driver.request(ids(60), 84)
    driver.add(request)
    while request.prompt_left or not request.token_ids:
        driver.step()
    driver.step(50)
    encoding = encoding_of(driver, schema_of(1))
    driver.add(encoding)
    driver.finish()
    assert encoding.complete
    assert encoding.preemptions > 0
    check_stock(driver, request)
    assert driver.all_free()


def test_fault_in_a_pass_ends_its_encoding():
    driver = Driver()
    encoding = encoding_of(driver, schema_of(2))
    driver.add(encoding)
    with failing(driver.loaded, RuntimeError("broken")):
        assert driver.engine.step() == [encoding]
    assert str(encoding.failure) == "broken"
    assert not driver.engine.busy
    assert driver.all_free()


def test_modules_beyond_learned_positions_are_not_encoded():
    texts = "".join(f'<module name="m{n}">{"abcdefgh" * 110}{n}</module>' for n in range(4))
    schema = Schema.from_string(f'<schema name="s">{texts}</schema>')
    driver = Driver("gpt2", kv_tokens=5000, positions="schema", reuse="isolated", record=False)
    driver.llm.add_schema(schema)
    (found,) = [driver.llm.processor.schemas.module_specs("s", driver.llm.policy())]
    assert [driver.store.get(spec) is not None for specs in found.values() for spec in specs] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("kind", ["request", "encoding"])
def test_fault_after_allocation_releases_memory(monkeypatch: pytest.MonkeyPatch, kind: str):
    driver = Driver(kv_tokens=512, chunk_size=16)

    def task() -> Any:
        return driver.request(ids(40), 3) if kind == "request" else encoding_of(driver, schema_of(3))

    def fail(prefill: object) -> None:
        raise RuntimeError("a fault")

    broken, whole = task(), task()
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.kv_manager.pending, "add", fail)
        driver.add(broken)
        assert driver.step() == [broken]
    assert str(broken.error) == "a fault"
    driver.add(whole)
    driver.finish()
    assert whole.error is None
    assert driver.all_free()
