"""A short load of many clients: right answers pass, wrong ones are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inlay.api.openai.respond import Chunks
from inlay.types import RequestOutput
from inlay_lab.bench.serve import clients
from inlay_lab.bench.serve.clients import Case, Verdict
from inlay_lab.bench.serve.collector import collecting
from inlay_lab.bench.serve.measure import Load, run_in_turns, run_load
from tests.commands import run_file
from tests.server.server.conftest import Site, running, small_model

FILE = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"
SHORT = Load(clients=8, seconds=1.5, prompts=5, max_tokens=24)


@pytest.fixture(scope="module")
def loaded() -> Any:
    llm = small_model(max_num_seqs=6)
    with running(llm) as site:
        yield site
    llm.shutdown()


def run(site: Site, load: Load = SHORT) -> dict[str, Any]:
    return asyncio.run(run_load(f"http://127.0.0.1:{site.port}", load, lambda line: None))


def test_short_load_passes(loaded: Site):
    found = run(loaded)
    assert (found["wrong"], found["errors"], found["problems"]) == (0, 0, [])
    assert found["equal"] + found["near_ties"] + found["habits"]["leave"] >= found["requests"] > 8
    assert found["equal"] > 0.8 * found["requests"] - found["habits"]["leave"]
    assert set(found["overhead_us"]) == {"read", "translate", "lay_out", "respond", "write", "trace"}
    assert found["overhead_us"]["trace"] == 0, "traces are off"
    assert found["cpu_ms_per_request"] > 0
    assert found["cached_share"] > 0.5
    assert found["held_chunks_at_the_end"] == 0
    assert found["engine_steps"] > 0
    assert min(found["ttft_ms"].values()) > 0
    assert len(found["rss_mib"]) == 7


def test_lost_tokens_are_detected(loaded: Site, monkeypatch: pytest.MonkeyPatch):
    update = Chunks.update

    def lossy(self: Chunks, number: int, output: RequestOutput) -> Iterable[str]:
        answers = tuple(replace(answer, text=answer.text[1:]) for answer in output.outputs)
        return update(self, number, replace(output, outputs=answers))

    monkeypatch.setattr(Chunks, "update", lossy)
    found = run(loaded, Load(clients=4, seconds=1, prompts=1, max_tokens=8))
    assert found["wrong"] > 0
    assert found["problems"]


def test_command_uses_a_running_server(loaded: Site, capsys):
    url = f"http://127.0.0.1:{loaded.port}"
    options = ["--url", url, "--clients", "2", "--seconds", "0.3", "--prompts", "2", "--max-tokens", "4"]
    run_file(FILE, *options)
    assert capsys.readouterr().out.startswith(f'{{"model": "{url}", "clients": 2, ')


def test_servers_with_and_without_traces_are_compared_alternately():
    llm = small_model(max_num_seqs=6)
    with (
        collecting() as collector,
        running(llm) as plain,
        running(llm, otlp_traces_endpoint=collector.endpoint) as traced,
    ):
        urls = {name: f"http://127.0.0.1:{site.port}" for name, site in (("off", plain), ("on", traced))}
        load, rounds = replace(SHORT, clients=2, seconds=0.5, only="stream"), []
        found = asyncio.run(run_in_turns(urls, load, 3, rounds.append))
    order = [line.rpartition(" ")[2] for line in rounds if line.startswith("round")]
    assert order == ["off", "on", "on", "off", "off", "on"]
    assert (found["off"]["wrong"], found["on"]["errors"]) == (0, 0)
    assert found["ratio"]["on / off"].keys() >= {"requests_per_s", "cpu_ms_per_request", "overhead_us", "ttft_ms"}
    assert found["off"]["trace_us"] == 0 < found["on"]["trace_us"]
    llm.shutdown()
    assert collector.requests >= found["on"]["requests"] > 0


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("one two three", Verdict.EQUAL),
        ("one two four", Verdict.WRONG),
        ("one xxx three", Verdict.NEAR_TIE),
        ("one two", Verdict.WRONG),
        ("one two three!", Verdict.WRONG),
    ],
)
def test_verdicts(said: str, verdict: Verdict):
    case = Case("", {}, "one two three", [("one", 1.0), (" two", 1e-4), (" three", 0.5)])
    assert case.judge(said) is verdict


def test_client_skips_keep_alive_comments():
    class Quiet:
        """A connection that stays silent for long."""

        async def send(self, *_: object) -> int:
            return 200

        async def parts(self) -> AsyncIterator[bytes]:
            for part in (b": keep-alive\n\n", b': keep-alive\n\ndata: {"usage": null}\n\n', b"data: [DONE]\n\n"):
                yield part

    async def heard() -> list[str | None]:
        case = SimpleNamespace(path="/v1/completions", body={}, news=lambda chunk: "news")
        return [news async for news in clients.news_of(Quiet(), case, clients.Results())]

    assert asyncio.run(heard()) == ["", "news", "", None]
