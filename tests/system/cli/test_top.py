"""``inlay top``: rates between two looks at a server, as lines and as a screen."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from inlay.cli import main as command_line
from inlay.cli.cache_source import RunningCache
from inlay.cli.top import Rates, ServerSample, line, read_metrics, tier_uses, view
from inlay.errors import ParameterError
from tests.model.server.site import with_keys
from tests.server.server.conftest import COMPLETIONS, SCHEMA, running, small_model

METRICS = """\
# TYPE inlay:prompt_tokens_total counter
inlay:prompt_tokens_total{engine="0",model_name="m"} %d
# TYPE inlay:module_tokens_missed_total counter
inlay:module_tokens_missed_total{engine="0",model_name="m",reason="evicted"} %d
inlay:module_tokens_missed_total{engine="0",model_name="m",reason="never seen"} 7
# TYPE inlay:requests_total counter
inlay:requests_total{engine="0",model_name="m",endpoint="/v1/x",tenant="a",status="200"} 2
inlay:requests_total{engine="0",model_name="m",endpoint="/v1/x",tenant="b",status="400"} 3
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 99
"""
PROMPT = {"pml": '<prompt schema="trip"><miami/>Where can we surf?</prompt>', "max_tokens": 3, "reuse": "modular"}


def sample(at: float, prompts: int, evicted: int) -> ServerSample:
    return ServerSample(at, read_metrics(METRICS % (prompts, evicted)), {})


def test_metrics_are_summed_over_unused_labels():
    values = read_metrics(METRICS % (10, 4))
    assert values["module_tokens_missed_total"] == {"evicted": 4, "never seen": 7}
    assert sum(values["requests_total"].values()) == 5
    assert values["prompt_tokens_total"] == {"": 10}


def test_rates_are_by_second_and_misses_by_reason():
    rates = Rates(sample(1.0, 100, 4), sample(3.0, 150, 14))
    assert rates.per_second("prompt_tokens_total") == 25.0
    assert rates.misses() == [("evicted", 10, 14), ("never seen", 0, 7)]
    assert rates.cached_share() == 0.0
    assert rates.mean("time_to_first_token_seconds") is None


def test_first_look_has_no_rates_and_a_restart_counts_from_zero():
    assert Rates(None, sample(1.0, 100, 4)).per_second("prompt_tokens_total") is None
    assert Rates(sample(1.0, 100, 4), sample(2.0, 30, 0)).change("prompt_tokens_total") == 30


def test_non_metrics_text_is_rejected():
    with pytest.raises(ParameterError):
        read_metrics("inlay:x{ 1")


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"{}", b'{"data": 3}', b'{"data": []}'])
def test_other_server_is_rejected(content: bytes, capsys: pytest.CaptureFixture[str]):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"" if self.path == "/metrics" else content
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever).start()
        try:
            status = command_line.main(["top", "--frames", "1", "--url", f"http://127.0.0.1:{server.server_port}"])
        finally:
            server.shutdown()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert (status, "--url" in sentence) == (2, True)


def test_a_server_is_watched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    llm = small_model(profile="off")
    with running(llm, [SCHEMA], reuse="modular") as site:
        server = RunningCache(f"http://127.0.0.1:{site.port}")
        before = ServerSample.of(server)
        answers = [site.post(COMPLETIONS, **PROMPT) for _ in range(2)]
        rates = Rates(before, ServerSample.of(server))
        prompts = sum(answer["usage"]["prompt_tokens"] for answer in answers)
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        assert rates.change("prompt_tokens_total") == prompts
        assert rates.cached_share() == pytest.approx(cached / prompts)
        (pool,) = tier_uses(rates.now)
        assert (pool.name, pool.hits, pool.tokens) == ("pool", cached, server.stats()["pool"]["tokens"])
        printed = line(rates)
        assert f" cached={cached / prompts:.0%} " in printed
        assert " generated_tokens/s=" in printed
        console = Console(record=True, width=110)
        console.print(view(rates, server.url))
        screen = console.export_text()
        assert re.search(rf"pool\s+\d+\s+{pool.tokens}\s", screen)
        assert "none is running" in screen
        capsys.readouterr()

        options = ["top", "--url", server.url, "--interval", "0.2", "--frames", "2"]
        assert command_line.main(options) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2
        assert all(re.match(r"\d{4}-\d\d-\d\dT\S+ running=0 waiting=0 ", one) for one in lines)
        for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "110"), ("LINES", "40")):
            monkeypatch.setenv(name, value)
        assert command_line.main(options) == 0
        assert "from the cache" in capsys.readouterr().out
    llm.shutdown()


def test_server_with_keys_needs_an_admin_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for site in with_keys(tmp_path):
        options = ["top", "--url", f"http://127.0.0.1:{site.port}", "--frames", "1"]
        assert command_line.main([*options, "--api-key", site.keys["ann"]]) == 2
        assert "send an admin's key" in capsys.readouterr().err
        assert command_line.main([*options, "--api-key", site.keys["root"]]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--interval", "0"],
        ["--interval", "nan"],
        ["--frames", "0"],
        ["--url", "ftp://x"],
        ["--url", "http://127.0.0.1:9"],
    ],
)
def test_invalid_options_are_rejected(options: list[str], capsys: pytest.CaptureFixture[str]):
    assert command_line.main(["top", *options]) == 2
    assert options[0] in (error := capsys.readouterr().err) or options[1] in error
