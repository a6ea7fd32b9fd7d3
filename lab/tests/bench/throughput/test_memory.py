"""Resident documents: their memory, and that questions about them find them."""

from __future__ import annotations

import pytest

from inlay.client.async_llm import AsyncLLM
from inlay.kv.identity import Context, TokenRun
from inlay_lab.bench.throughput.memory import ResidentDocuments
from inlay_lab.bench.throughput.workload import Sizes, random_ids
from tests.conftest import tiny

pytestmark = pytest.mark.long

SIZES = Sizes(document=130, question=6)


@pytest.fixture
def alone():
    llm = AsyncLLM(tiny("llama"), seed=0, kv_memory="4MiB", chunk_size=64)
    yield llm
    llm.shutdown()


def test_resident_documents_stay_and_are_found(alone):
    shelf = ResidentDocuments(alone, SIZES)
    chunk = 64 * alone.store.pool.bytes_per_token
    assert shelf.seconds_for(0) == 0
    none = shelf.measure(0)
    assert (none["kv_bytes"], none["kv_bytes_per_document"], none["hit_rate"]) == (0, None, 0)
    assert none["lookup_us"] is None
    assert none["lookup_miss_us"] > 0
    three = shelf.measure(3)
    assert three["kv_bytes"] == 3 * 3 * chunk  # 130 tokens each
    assert three["kv_bytes_per_document"] == 3 * chunk
    assert three["hit_rate"] == pytest.approx(130 / 136, abs=1e-3)
    assert three["lookup_us"] > 0
    assert three["ttft_ms"]["p50"] > 0
    assert shelf.seconds_for(3) == 0
    assert shelf.seconds_for(5) > 0
    five = shelf.measure(5)
    assert five["kv_bytes"] == 5 * 3 * chunk, "questions leave nothing of their own"
    assert five["kv_bytes_of_tokens"] == 130 * alone.store.pool.bytes_per_token
    assert len(shelf.documents) == 5
    for document in shelf.documents:
        assert alone.store.longest(TokenRun(tuple(document), 0, Context())).tokens == 130


def test_a_lookup_is_timed_for_just_these_tokens(alone, monkeypatch):
    shelf, asked = ResidentDocuments(alone, SIZES), []
    longest = alone.store.longest
    shelf.measure(1)

    def noted(run: TokenRun, *, most: int | None = None):
        asked.append((run.ids, most, longest(run, most=most).tokens))
        return longest(run, most=most)

    monkeypatch.setattr(alone.store, "longest", noted)
    shelf.measure(1)
    lookups = [(len(ids), most, found) for ids, most, found in asked if asked.count((ids, most, found)) >= 700]
    assert set(lookups) == {(136, 135, 130), (136, 135, lookups[-1][2])}
    assert lookups[-1][2] < 4, "a prompt that nobody has asked shares no more than its first tokens"


def test_random_ids_are_of_the_vocabulary():
    import random

    assert set(random_ids(random.Random(0), 5, 500)) == set(range(5))
