"""LMCache's benchmarks about text that is read in other places, as they are, against ``inlay serve``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inlay import AsyncLLM
from tests.server.clients.site import RECORDED, served
from tests.server.server.conftest import Site, running
from tests.system.clients.lmcache_bench import LMCACHE, WORKLOADS, bench
from tests.system.clients.vocabulary import many_words

BODIES: list[dict[str, Any]] = json.loads((RECORDED / f"{LMCACHE.name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_lmcache_workload_runs(workload: str, tmp_path: Path) -> None:
    if not LMCACHE.installed:
        pytest.skip("lmcache is not installed; run make clients, or set INLAY_CLIENTS to where its directory is")
    model = many_words(tmp_path / "model")
    with served(model, name=str(model)) as base:
        done = bench(workload, base, str(model), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "bench_summary.json").read_text())
    assert summary["results"]["failed_requests"] == 0
    if workload == "rag-qa-quality":
        assert [one["sample_id"] for one in json.loads((tmp_path / "rag.json").read_text())["per_sample"]] == [
            "q0",
            "q1",
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = many_words(tmp_path_factory.mktemp("model"))
    llm = AsyncLLM(str(directory), kv_memory="64MiB", seed=0)
    with running(llm, served_names=("words",)) as found:
        yield found
    llm.shutdown()


@pytest.mark.parametrize("body", BODIES, ids=lambda one: "-".join(sorted(one["body"].keys() - {"model", "stream"})))
def test_lmcache_request_streams_text_and_counts(site: Site, body: dict[str, Any]) -> None:
    """Texts in deltas, and at the end a chunk with the counts, which its tables are made of."""
    events = site.stream(body["path"], **{**body["body"], "model": "words"})
    assert any(choice["delta"].get("content") for event in events for choice in event["choices"])
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] > 0
    assert 0 < usage["completion_tokens"] <= body["body"]["max_tokens"]
    if body["body"].get("ignore_eos"):
        assert usage["completion_tokens"] == body["body"]["max_tokens"]


def test_model_list_names_the_model(site: Site) -> None:
    status, _, answer = site.call("GET", "/v1/models")
    assert (status, answer["data"][0]["id"]) == (200, "words")


def test_common_prefix_is_read_from_the_cache(site: Site) -> None:
    """Documents in another place are not found: nothing in these requests says where one begins."""
    one, other = ("".join(f" {word}" for word in words) for words in (("baba", "bebe") * 40, ("dodo", "dudu") * 40))
    cached = []
    for content in (one + other, one + other, other + one):
        events = site.stream(
            "/v1/chat/completions",
            model="words",
            messages=[{"role": "user", "content": content}],
            max_tokens=1,
            stream_options={"include_usage": True},
        )
        cached.append(events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] > 150
    assert cached[2] < 20
