"""A short load of many clients: right answers pass, wrong ones are found."""

from __future__ import annotations

import asyncio
import runpy
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inlay.api.openai.stream import Chunks
from inlay.types import RequestOutput
from inlay_lab.bench.serve import clients
from inlay_lab.bench.serve.clients import Case, Verdict
from inlay_lab.bench.serve.measure import Load, run_load
from tests.server.conftest import Site, running, small_model

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


def test_a_short_load(loaded: Site):
    found = run(loaded)
    assert (found["wrong"], found["errors"], found["problems"]) == (0, 0, [])
    assert found["equal"] + found["near_ties"] + found["habits"]["leave"] >= found["requests"] > 8
    assert found["equal"] > 0.8 * found["requests"] - found["habits"]["leave"]
    assert set(found["overhead_us"]) == {"read", "translate", "lay_out", "respond", "write"}
    assert found["cached_share"] > 0.5
    assert found["held_chunks_at_the_end"] == 0
    assert found["engine_steps"] > 0
    assert min(found["ttft_ms"].values()) > 0
    assert len(found["rss_mib"]) == 7


def test_tokens_that_get_lost_are_found(loaded: Site, monkeypatch: pytest.MonkeyPatch):
    update = Chunks.update

    def lossy(self: Chunks, number: int, output: RequestOutput) -> Iterable[str]:
        answers = tuple(replace(answer, text=answer.text[1:]) for answer in output.outputs)
        return update(self, number, replace(output, outputs=answers))

    monkeypatch.setattr(Chunks, "update", lossy)
    found = run(loaded, Load(clients=4, seconds=1, prompts=1, max_tokens=8))
    assert found["wrong"] > 0
    assert found["problems"]


def test_its_command_takes_a_server_that_runs(loaded: Site, monkeypatch: pytest.MonkeyPatch, capsys):
    url = f"http://127.0.0.1:{loaded.port}"
    options = ["--url", url, "--clients", "2", "--seconds", "0.3", "--prompts", "2", "--max-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["serve_load.py", *options])
    runpy.run_path(str(FILE), run_name="__main__")
    assert capsys.readouterr().out.startswith(f'{{"model": "{url}", "clients": 2, ')


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


def test_a_client_skips_the_comments_of_a_long_silence():
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
