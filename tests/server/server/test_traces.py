"""Traces: one span for each request with its phases, sent to a collector, and never in the way of a request."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from inlay.errors import ParameterError
from inlay.server.settings import ServerSettings
from inlay.server.traces import Phase, phases
from inlay.types import RequestMetrics
from tests.server.server.conftest import COMPLETIONS, SCHEMA, Site, running, small_model

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = {"pml": '<prompt schema="trip"><miami/>Where can we surf?</prompt>', "max_tokens": 4, "reuse": "modular"}


class Collector:
    """Receives traces by OTLP over HTTP."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.bytes = b""

    def take(self, body: bytes) -> None:
        self.bytes += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting(delay_s: float = 0.0) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            time.sleep(delay_s)
            collector.take(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def traced(endpoint: str | None) -> Iterator[Site]:
    llm = small_model(profile="off")
    with running(llm, [SCHEMA], otlp_traces_endpoint=endpoint) as site:
        yield site
    llm.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_request_is_a_span_with_its_phases_as_children():
    with collecting() as collector:
        with traced(collector.endpoint) as site:
            answer = site.post(COMPLETIONS, **PROMPT)
            site.call("POST", COMPLETIONS, PROMPT, traceparent=PARENT)
            assert site.call("POST", COMPLETIONS, {"prompt": "x", "max_tokens": -1})[0] == 400
        first, second, wrong = collector.named("llm_request")
        assert collector.services == {"inlay"}
        told = attributes(first)
        assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
        assert told["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
        assert told["inlay.module_tokens"] == answer["inlay"]["module_tokens"]
        assert (told["http.route"], told["gen_ai.request.model"]) == (COMPLETIONS, "tiny")
        assert answer["id"].endswith(told["gen_ai.request.id"])
        inside = [span for span in collector.spans if span.parent_span_id == first.span_id]
        names = [span.name for span in inside]
        assert (names[0], names[-2:]) == ("queue", ["prefill", "decode"])
        assert first.start_time_unix_nano == inside[0].start_time_unix_nano
        for one, other in pairwise(inside):
            assert one.end_time_unix_nano == pytest.approx(other.start_time_unix_nano, abs=1000)
        ttft = (inside[-1].start_time_unix_nano - first.start_time_unix_nano) / 1e9
        assert ttft == pytest.approx(answer["inlay"]["timing"]["ttft_s"], abs=1e-4)
        assert second.trace_id.hex() == PARENT.split("-")[1]
        assert second.parent_span_id.hex() == PARENT.split("-")[2]
        assert attributes(wrong)["error.type"] == "invalid_value"
        assert b"surf" not in collector.bytes, "no prompt leaves the server"


def test_unsampled_trace_is_not_exported():
    with collecting() as collector:
        with traced(collector.endpoint) as site:
            site.call("POST", COMPLETIONS, PROMPT, traceparent=PARENT[:-2] + "00")
        assert collector.spans == []


def test_unreachable_or_slow_collector_does_not_delay_requests():
    with collecting(delay_s=30.0) as slow:
        for endpoint in ("http://127.0.0.1:9/v1/traces", slow.endpoint):
            with traced(endpoint) as site:
                assert site.post(COMPLETIONS, **PROMPT)["usage"]["completion_tokens"] > 0
                began = time.monotonic()
            assert time.monotonic() - began < 20


def test_traces_are_off_by_default():
    with traced(None) as site:
        assert site.service.traces is None


def test_the_phases_follow_each_other():
    metrics = RequestMetrics(ttft_s=1.0, encode_s=0.3, total_s=3.0, queue_s=0.1, fetch_s=0.2, compute_s=0.7)
    found = list(phases(metrics))
    assert [phase.name for phase in found] == ["queue", "load", "encode", "prefill", "decode"]
    assert [phase.end for phase in found] == pytest.approx([0.1, 0.3, 0.6, 1.0, 3.0])
    assert list(phases(RequestMetrics())) == []
    assert list(phases(RequestMetrics(queue_s=0.5))) == [Phase("queue", 0.0, 0.5)]


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://"])
def test_invalid_endpoint_is_rejected(endpoint: str):
    with pytest.raises(ParameterError, match="otlp_traces_endpoint"):
        ServerSettings(otlp_traces_endpoint=endpoint)
