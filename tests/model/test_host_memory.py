"""The host tier through the LLM class: the device's pool is too small for the text that requests repeat.

The device is a second pool of the CPU, so these tests do not cover the streams of a GPU.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from inlay import LLM, ParameterError, Prompt, SamplingParams, Schema
from inlay.config import EngineConfig
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.host import HostTier
from tests.conftest import tiny
from tests.model.attention.devices import pretend
from tests.raising import raises
from tests.unit.kv.offload.watched_storage import Held

WORDS = "one of the modules, which has a few tokens more than the others and says nothing of what they say"
TEXTS = [
    f'<schema name="s{each}">'
    + "".join(f'<module name="m{number}">{each}{number}: {WORDS}</module>' for number in range(4))
    + "</schema>"
    for each in range(4)
]
SCHEMAS = [Schema.from_string(text) for text in TEXTS]
PROMPTS = [
    Prompt.from_string(f'<prompt schema="s{each}"><m{one}/><m{other}/>What of {one}?</prompt>')
    for each in range(4)
    for one, other in ((0, 1), (2, 3), (1, 3))
]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def make(**settings) -> LLM:
    """An LLM whose pool has room for about half of all modules."""
    settings = {"kv_memory": "300KiB", "chunk_size": 16, "seed": 0, "profile": "off", "promotion_memory": 0} | settings
    settings = {"reuse": "anchored"} | settings
    return LLM(tiny("llama"), **settings)


def add_all(llm: LLM) -> int:
    """All schemas, encoded; returns how many tokens there are to encode."""
    for schema in SCHEMAS:
        llm.add_schema(schema)
    return llm.stats().encoded_tokens


def answers(llm: LLM, prompts=PROMPTS) -> list:
    return [llm.generate(prompt, GREEDY)[0] for prompt in prompts]


def keys_of(llm: LLM, schema: Schema) -> set[bytes]:
    _, specs = llm.schemas.add(schema, llm.policy())
    return {spec.key for spec in specs}


def tokens_of(outputs) -> list:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected():
    llm = make(kv_memory="8MiB")
    all_of_it = add_all(llm)
    found = tokens_of(answers(llm))
    llm.shutdown()
    return all_of_it, found


@pytest.fixture
def device(monkeypatch):
    pretend(monkeypatch)


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8", "kv_memory": "90KiB"}, {"eviction": "lru"}])
def test_a_working_set_of_twice_the_pool_is_encoded_once(device, settings, expected):
    llm = make(**settings)
    encoded = add_all(llm)
    assert encoded == expected[0] >= 2 * llm.store.pool.slots
    first = answers(llm)
    second = answers(llm, PROMPTS[::-1])[::-1]
    stats = llm.stats()
    assert stats.encoded_tokens == encoded, "no token of a module was computed twice"
    assert tokens_of(first) == tokens_of(second)
    if "kv_cache_dtype" not in settings:
        assert tokens_of(first) == expected[1], "bit for bit what was computed"
    assert 0 < stats.host_tokens <= stats.host.hit_tokens, "of some, the end alone was missing"
    assert sum(output.usage.host_tokens for output in first + second) > 0
    assert all(output.usage.computed_tokens < 20 for output in first + second)
    assert llm.local.residency.tiers[0].name == "host"
    llm.shutdown()


def test_evicted_text_is_recomputed_without_host_memory(device, expected):
    llm = make(host_memory=0)
    encoded = add_all(llm)
    assert tokens_of(answers(llm)) == expected[1]
    assert llm.stats().encoded_tokens > encoded
    assert (llm.stats().host, llm.stats().host_tokens, llm.local.residency.tiers) == (None, 0, ())
    llm.shutdown()


def test_answers_do_not_wait_for_copies(device, expected):
    """While every copy hangs, requests go on: a decode step takes slots that are being copied, or drops their
    contents.
    """
    llm = make(store_timeout_s=0.05)
    llm.storage.before_read = held = Held()
    encoded = add_all(llm)
    assert tokens_of(answers(llm)) == expected[1]
    assert llm.stats().host.segments == 0
    assert llm.stats().encoded_tokens > encoded
    held.go_on.set()
    llm.shutdown()


def test_decode_steps_never_wait(device):
    """An answer that outgrows the free part of the pool gets its chunks while a copy hangs, in the same number of
    steps as without a host tier."""
    steps = []
    for host_memory in ("0", "4MiB"):
        llm = make(host_memory=host_memory, kv_memory="200KiB", store_timeout_s=30)
        llm.add_schema(SCHEMAS[0])
        llm.store.pool.peak_chunks = 0
        before = llm.stats().steps
        llm.storage.before_read = held = Held()
        room = llm.store.pool.free_chunks * 16
        (output,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=room + 40, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == room + 40
        assert held.reached.is_set() == (host_memory != "0")
        assert llm.stats().preemptions == 0
        steps.append(llm.stats().steps - before)
        held.go_on.set()
        llm.shutdown()
    assert steps[0] == steps[1]


def test_device_host_disk(device, tmp_path, expected):
    """With a store, evicted text stays on disk, and a second process reads it there."""
    for start in range(2):
        llm = make(store=tmp_path, store_private=True)
        encoded = add_all(llm)
        assert encoded == (0 if start else expected[0])
        assert tokens_of(answers(llm)) == expected[1]
        llm.local.residency.flush(30)
        stats = llm.stats()
        assert stats.encoded_tokens == encoded
        assert stats.host_tokens > 0
        assert stats.disk.segments == 16
        llm.shutdown()


def test_request_waiting_for_a_load_is_not_overtaken_forever(device):
    """While another load is in progress, later requests do not take the room that a large request waits for."""
    llm = make(store_timeout_s=30)
    add_all(llm)
    llm.storage.before_put = held = Held()
    engine, run, residency = llm.local.engine, llm.local.thread.run, llm.local.residency

    def added(prompt, tokens: int = 4):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = llm.local.prepare(llm.processor.process(prompt, params, llm.policy()))
        run(lambda: engine.add(request))
        return request

    hangs = added(Prompt.from_string('<prompt schema="s1"><m0/>What of it?</prompt>'))
    while not residency.bringing(keys_of(llm, SCHEMAS[1])):
        run(engine.step)
        residency.wait(0.01)
    long = added("." * 480, 40)
    while not long.token_ids:
        run(engine.step)
        residency.wait(0.01)
    large, small = added(PROMPTS[0]), added("which there is room for")
    while not long.finished:
        run(engine.step)
        residency.wait(0.02)
    assert not small.token_ids
    held.go_on.set()
    while engine.busy:
        run(engine.step)
        residency.wait(0.001)
    assert all(request.finished and request.error is None for request in (hangs, long, large, small))
    assert large.usage.host_tokens > 0
    llm.shutdown()


def test_evicted_or_removed_schemas_leave_the_host_tier(device):
    llm = make()
    add_all(llm)
    host = llm.local.residency.tiers[0]
    before = host.stats().segments
    assert llm.evict("s0") > 0
    llm.local.residency.flush(10)
    assert not any(map(llm.local.residency.below, keys_of(llm, SCHEMAS[0])))
    llm.remove_schema("s1")
    assert host.stats().segments < before
    encoded = llm.stats().encoded_tokens
    answers(llm, PROMPTS[:1])
    assert llm.stats().encoded_tokens > encoded, "it is computed again"
    llm.reset_prefix_cache()
    assert host.stats().segments == 0
    llm.shutdown()


def test_lifetimes_end_in_the_host_tier(device, clock):
    llm = make()
    llm.add_schema(SCHEMAS[0], ttl="1m")
    for schema in SCHEMAS[1:]:
        llm.add_schema(schema)
    host = llm.local.residency.tiers[0]
    keys = keys_of(llm, SCHEMAS[0])
    assert keys & {entry.key for entry in host.iterate()}
    clock.advance(61)
    (output,) = answers(llm, PROMPTS[:1])
    assert dict(output.usage.misses).keys() == {"expired"}
    llm.local.residency.flush(10)
    assert not keys & {entry.key for entry in host.iterate()}
    llm.shutdown()


def test_host_tier_keeps_salts_apart_and_stores_private_text(device):
    """The memory belongs to this process, so private text may be stored there. Only its own salt finds it."""
    llm = make()
    private = Schema.from_string(f'<schema name="p"><module name="m">{WORDS}, privately</module></schema>')
    prompt = Prompt.from_string('<prompt schema="p"><m/>What?</prompt>')
    llm.add_schema(private, cache_salt="a")
    llm.generate(prompt, GREEDY, cache_salt="a")
    add_all(llm)
    host = llm.local.residency.tiers[0]
    assert any(entry.private for entry in host.iterate())
    encoded = llm.stats().encoded_tokens
    (mine,) = llm.generate(prompt, GREEDY, cache_salt="a")
    assert mine.usage.host_tokens > 0
    assert llm.stats().encoded_tokens == encoded
    llm.add_schema(private, cache_salt="b", encode=False)
    (others,) = llm.generate(prompt, GREEDY, cache_salt="b")
    assert (others.usage.host_tokens, others.usage.cached_tokens) == (0, 0)
    llm.shutdown()


def test_loaded_text_is_written_to_disk_on_its_second_use(device, tmp_path, monkeypatch):
    """Loading the text again does not count as a use; reading it during the load does.

    The folder reports no spare room, because with room the first use writes the text.
    """
    monkeypatch.setattr(DiskTier, "has_room", False)
    document = {"type": "text", "text": f"{WORDS}, in a document", "cache_control": {"type": "ephemeral"}}
    chat = [{"role": "user", "content": [document, {"type": "text", "text": "What?"}]}]
    llm = make(store=tmp_path, store_private=True)
    llm.generate([chat], GREEDY)
    add_all(llm)
    llm.local.residency.flush(30)
    before = llm.stats().disk.tokens
    (again,) = llm.generate([chat], GREEDY)
    assert again.usage.host_tokens > 0
    llm.local.residency.flush(30)
    assert llm.stats().disk.tokens >= before + again.usage.host_tokens
    llm.shutdown()


def test_corrupt_byte_is_recomputed(device, expected, caplog):
    llm = make(host_memory="2MiB")
    encoded = add_all(llm)
    host = llm.local.residency.tiers[0]
    host.memory.block[::64] ^= 1
    assert tokens_of(answers(llm)) == expected[1]
    assert llm.stats().encoded_tokens > encoded
    assert dict(llm.stats().host.misses)["corrupt"] > 0
    assert "memory of the host" in caplog.text
    llm.shutdown()


def test_cpu_has_no_separate_host_tier(caplog):
    with caplog.at_level(logging.WARNING):
        llm = make(host_memory="1GiB")
    assert "device and host are one tier here" in caplog.text
    assert llm.local.residency.tiers == ()
    assert llm.stats().host is None
    llm.shutdown()
    caplog.clear()
    make().shutdown()
    make(host_memory="0").shutdown()
    assert "host_memory" not in caplog.text


def test_host_memory_sizes(monkeypatch):
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=8 << 30))
    monkeypatch.setattr("inlay.config.psutil", memory)
    assert EngineConfig().host_bytes() == 2 << 30
    assert EngineConfig(host_memory="3GiB").host_bytes() == 3 << 30
    assert EngineConfig(host_memory=0).host_bytes() == EngineConfig(host_memory="0").host_bytes() == 0
    for wrong in (-1, True, False, "much", ""):
        with raises("parameter.invalid_size", ParameterError, names="host_memory"):
            EngineConfig(host_memory=wrong)


def test_host_memory_is_pinned_by_the_device(device, monkeypatch):
    locked = []
    monkeypatch.setattr("inlay.attention.storage.DeviceStorage.lock", lambda self, memory: locked.append(memory))
    llm = make(host_memory="2MiB")
    assert [len(block) for block in locked] == [2 << 20]
    assert isinstance(llm.local.residency.tiers[0], HostTier)
    llm.shutdown()


@pytest.mark.long
def test_run_reports_tokens_of_each_tier(device, tmp_path, capsys):
    from inlay.cli.main import main

    schema, prompt = tmp_path / "s.xml", tmp_path / "p.xml"
    schema.write_text(TEXTS[0])
    prompt.write_text('<prompt schema="s0"><m0/>What?</prompt>')
    main(["run", str(schema), "--prompt", str(prompt), "--json", "--store", "off", "--host-memory", "64MiB"])
    assert json.loads(capsys.readouterr().out)["tiers"].keys() == {"device", "host", "disk"}
