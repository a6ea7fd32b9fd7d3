"""Prefetch: text that is likely to be read next is loaded ahead, and the shared store is queried for queued
requests.
"""

from __future__ import annotations

import threading

import pytest

from inlay import LLM, ParameterError, Prompt, SamplingParams, Schema
from inlay.engine import lower_tiers
from inlay.kv.offload import shared
from tests.conftest import tiny
from tests.model.hooks import each_pass
from tests.model.test_store import answer, make, restarted
from tests.raising import raises
from tests.unit.kv.offload.fake_server import FakeServer

UNION = Schema.from_string(
    '<schema name="u">Always here. <union><module name="a">The first of three that exclude each other.</module>'
    '<module name="b">The second one of them, of some more tokens than it.</module></union>'
    '<module name="c">A module beside them, which anybody may take as well.</module></schema>'
)


def taking(*modules: str) -> Prompt:
    return Prompt.from_string(f'<prompt schema="u">{"".join(f"<{name}/>" for name in modules)}What then?</prompt>')


@pytest.fixture
def store(tmp_path):
    """A folder that has all of UNION."""
    llm = make(tmp_path)
    llm.add_schema(UNION)
    llm.shutdown()
    return tmp_path


def in_pool(llm: LLM, module: str) -> bool:
    """Whether a module is in the pool or gets there soon."""
    (spec,) = llm.processor.schemas.module_specs("u", llm.policy("anchored"))[module]
    while llm.local.residency.bringing([spec.key]):
        llm.local.residency.wait(10)
        llm.local.call(llm.local.engine.poll).result()
    return llm.store.get(spec) is not None


@pytest.mark.parametrize(("prefetch", "there"), [("waiting", False), ("likely", True)])
def test_sibling_of_a_union_member_is_prefetched(store, prefetch, there):
    llm = make(store, prefetch=prefetch)
    llm.add_schema(UNION, encode=False)
    answer(llm, taking("a"))
    assert in_pool(llm, "b") is there
    assert not in_pool(llm, "c"), "it is no sibling"
    llm.shutdown()


def test_modules_of_the_last_sequence_are_prefetched(store):
    llm = make(store, prefetch="likely")
    llm.add_schema(UNION, encode=False)
    answer(llm, taking("a"))
    answer(llm, taking("c"))
    llm.store.clear()
    answer(llm, taking("a"))
    assert in_pool(llm, "c")
    assert answer(llm, taking("c")).usage.disk_tokens == 0
    llm.shutdown()


@pytest.mark.parametrize(("kib", "remembered"), [(16, True), (12, False)])
def test_memory_for_observed_sequences_is_bounded(store, monkeypatch, kib, remembered):
    """Three modules of some 50 tokens, that take 4.4 KiB each."""
    monkeypatch.setattr(lower_tiers, "MOST_BYTES", kib * 2**10)
    llm = make(store, prefetch="likely")
    llm.add_schema(UNION, encode=False)
    for module in ("a", "c", "b"):
        answer(llm, taking(module))
    llm.store.clear()
    answer(llm, taking("a"))
    assert in_pool(llm, "c") is remembered
    llm.shutdown()


def test_shared_segments_are_loaded_for_queued_requests(monkeypatch):
    """With one slot taken, the shared tier is queried and read for the request in the queue."""
    server = FakeServer()
    restarted(None, taking("a"), UNION, store_shared=server.address)
    came, steps, in_time = threading.Event(), [], []
    get = shared.SharedTier.get
    monkeypatch.setattr(shared.SharedTier, "get", lambda *asked: (came.set(), get(*asked))[1])

    def slow(tokens):
        steps.append(tokens)
        if 3 <= len(steps) <= 10 and came.wait(2):  # the server's answer takes effect between two steps
            in_time.append(len(steps))

    llm = make(None, max_num_seqs=1, store_shared=server.address)
    llm.add_schema(UNION, encode=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with each_pass(llm.loaded, before=slow):
        _, second = llm.generate(["Somebody else's text.", taking("a")], params)
    assert in_time
    assert second.usage.shared_tokens > 0
    assert llm.stats().encoded_tokens == 0
    llm.shutdown()
    server.go_away()


def test_unknown_prefetch_mode_is_rejected():
    with raises("parameter.unknown_choice", ParameterError, names="prefetch"):
        LLM(tiny("llama"), prefetch="all")
