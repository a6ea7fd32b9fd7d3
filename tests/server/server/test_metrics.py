"""Metrics match the requests, use the names of dashboards and docs/reference/metrics.md, and stay bounded."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.testclient import TestClient

from inlay import SamplingParams, Schema
from inlay.api.failures import Failure
from inlay.server.logs import Line
from inlay.server.metric_families import STEPS, token_buckets
from inlay.server.metrics import Metrics
from inlay.types import (
    DRAFT_SOURCES,
    CompletionOutput,
    DivergenceTotals,
    EngineStats,
    RequestMetrics,
    RequestOutput,
    ShadowStats,
    Usage,
)
from tests.pages import DOCS, rows
from tests.server.server.watching import TENANTS, model, server, service

PAGE = DOCS / "reference/metrics.md"
ANN = TENANTS["Bearer ann"]
STATS = EngineStats(
    running=3,
    waiting=4,
    chunks=40,
    used_chunks=30,
    held_chunks=10,
    segments=7,
    stored_tokens=99,
    steps=12,
    preemptions=2,
    states=5,
    state_slots=16,
    used_state_slots=8,
    state_bytes=4096,
    state_hits=9,
    state_hit_tokens=800,
    state_evictions=3,
    drafted_tokens=(("module", 5), ("text", 7)),
    accepted_tokens=(("module", 4),),
    shadow=ShadowStats(
        samples=5,
        tokens=900,
        seconds=1.5,
        dropped=(("busy", 2), ("gone", 0), ("no room", 1), ("failed", 0)),
        totals=(
            DivergenceTotals("trip", "modular", 4, 0.61, (0, 1, 1, 1, 3, 3, 4, 4), 20, 15, 1),
            DivergenceTotals("", "anchored", 1, 0.01, (0, 0, 1, 1, 1, 1, 1, 1), 5, 5, 0),
        ),
    ),
)

#: All that vLLM's own dashboard (examples/observability/prometheus_grafana/grafana.json) asks for, with its labels.
DASHBOARD = {
    "e2e_request_latency_seconds_bucket": {"model_name", "le"},
    "e2e_request_latency_seconds_sum": {"model_name"},
    "e2e_request_latency_seconds_count": {"model_name"},
    "prompt_tokens_total": {"model_name"},
    "generation_tokens_total": {"model_name"},
    "inter_token_latency_seconds_bucket": {"model_name", "le"},
    "num_requests_running": {"model_name"},
    "num_requests_waiting": {"model_name"},
    "time_to_first_token_seconds_bucket": {"model_name", "le"},
    "kv_cache_usage_perc": {"model_name"},
    "request_prompt_tokens_bucket": {"model_name", "le"},
    "request_generation_tokens_bucket": {"model_name", "le"},
    "request_success_total": {"model_name", "finished_reason"},
    "request_queue_time_seconds_sum": {"model_name"},
    "request_prefill_time_seconds_sum": {"model_name"},
    "request_decode_time_seconds_sum": {"model_name"},
    "request_max_num_generation_tokens_sum": {"model_name"},
}

OF_ALL = ("model_name", "engine")  # labels

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def made(**settings: Any) -> Metrics:
    engine = SimpleNamespace(stats=lambda: STATS)
    return Metrics(engine, **{"model_name": "demo", "longest": 2048, "schemas": ["one"], **settings})


def samples(metrics: Metrics) -> Samples:
    """Name and labels (without the model's and the engine's) → value, read back from the response."""
    text = metrics.render().decode()
    return {
        (
            sample.name,
            frozenset((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine")),
        ): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def value(metrics: Metrics | Samples, name: str, **labels: str) -> float:
    counted = samples(metrics) if isinstance(metrics, Metrics) else metrics
    return counted[f"inlay:{name}", frozenset(labels.items())]


def finished(answers: list[int], usage: Usage, *, whole: bool = True, **times: float) -> RequestOutput:
    """An output whose answers have so many tokens."""
    metrics = RequestMetrics(
        **{"ttft_s": 0.5, "total_s": 2.5, "queue_s": 0.2, "fetch_s": 0.1, "compute_s": 0.2, **times}
    )
    outputs = [
        CompletionOutput(n, "", tuple(range(length)), finish_reason="length" if whole else None)
        for n, length in enumerate(answers)
    ]
    ids = (0,) * usage.prompt_tokens
    return RequestOutput("1", None, ids, ids, outputs, whole, usage, metrics)


@st.composite
def outputs(draw: st.DrawFn) -> RequestOutput:
    exact, module, computed = (draw(st.integers(0, 50)) for _ in range(3))
    shifted, again = draw(st.integers(0, exact + module)), draw(st.integers(0, computed))
    usage = Usage(exact + module + computed, exact + module, computed, exact, module, shifted, again)
    answers = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    return finished(answers, usage, whole=draw(st.booleans()))


@settings(max_examples=40, deadline=None)
@given(st.lists(outputs(), max_size=4), st.lists(st.integers(0, 10), max_size=5), st.booleans())
def test_totals_equal_the_sums_of_request_usage(given_outputs, told, failed):
    metrics = made()
    watch = metrics.begin("/v1/completions", ANN)
    said = sum(len(answer.token_ids) for output in given_outputs for answer in output.outputs)
    for count in told:
        watch.tokens(count)
    watch.end(given_outputs, Failure(504, "late", None, "deadline_exceeded") if failed else None)
    watch.end(given_outputs, None)
    counted = samples(metrics)
    usages = [output.usage for output in given_outputs]
    by_source = {
        name: value(counted, "prompt_tokens_by_source_total", source=name) for name in ("exact", "module", "computed")
    }
    assert by_source["exact"] == sum(usage.exact_tokens for usage in usages)
    assert by_source["module"] == sum(usage.module_tokens for usage in usages)
    assert (
        sum(by_source.values()) == value(counted, "prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    )
    assert value(counted, "prefix_cache_queries_total") == value(counted, "prompt_tokens_total")
    assert value(counted, "prefix_cache_hits_total") == by_source["exact"] + by_source["module"]
    assert value(counted, "prompt_tokens_cached_total") == value(counted, "prefix_cache_hits_total")
    assert value(counted, "prompt_tokens_shifted_total") == sum(usage.shifted_tokens for usage in usages)
    assert value(counted, "prompt_tokens_recomputed_total") == sum(usage.duplicate_tokens for usage in usages)
    assert value(counted, "generation_tokens_total") == max(said, sum(told))
    whole = not failed and bool(given_outputs) and all(output.finished for output in given_outputs)
    status = "504" if failed else "200" if whole else "499"
    assert value(counted, "requests_total", endpoint="/v1/completions", tenant="ann", status=status) == 1
    answers = [answer for output in given_outputs for answer in output.outputs]
    reasons = {"error": failed, "abort": not failed and not whole, "length": whole * len(answers), "stop": 0}
    for reason, count in reasons.items():
        assert value(counted, "request_success_total", finished_reason=reason) == count
    assert value(counted, "request_generation_tokens_count") == whole * len(answers)
    assert value(counted, "e2e_request_latency_seconds_count") == whole


def test_times_of_a_whole_request():
    metrics = made()
    watch = metrics.begin("/v1/completions", ANN)
    watch.asked(SamplingParams(n=2, max_tokens=7))
    watch.end([finished([5, 3], Usage(9, 4, 5, 4, 0, 0))], None)
    sums = {name: value(metrics, f"{name}_sum") for name in ("request_params_n", "request_params_max_tokens")}
    assert sums == {"request_params_n": 2, "request_params_max_tokens": 7}
    expected = {
        "time_to_first_token_seconds": 0.5,  # of the engine, if first_token was not called
        "request_queue_time_seconds": 0.2,
        "request_prefill_time_seconds": 0.3,
        "request_fetch_time_seconds": 0.1,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.3,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 9,
        "request_generation_tokens": 8,
        "request_max_num_generation_tokens": 5,
    }
    for name, total in expected.items():
        assert value(metrics, f"{name}_sum") == pytest.approx(total), name
    metrics.begin("/v1/completions", ANN).asked(SamplingParams(max_tokens=10**400))
    assert value(metrics, "request_params_max_tokens_sum") == 7 + 2**31


def test_tokens_are_counted_while_streaming():
    metrics = made()
    watch = metrics.begin("/v1/completions", None)
    for count in (0, 1, 2, 0):
        watch.tokens(count)
    began = time.perf_counter()
    watch.tokens(3)
    assert value(metrics, "generation_tokens_total") == 6
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    passed = value(metrics, "inter_token_latency_seconds_sum")
    time.sleep(0.02)
    watch.tokens(8, steps=4)
    assert value(metrics, "inter_token_latency_seconds_count") == 6
    assert value(metrics, "inter_token_latency_seconds_sum") - passed <= time.perf_counter() - began, "shared by four"
    watch.end(None, None)
    assert value(metrics, "generation_tokens_total") == 14
    assert value(metrics, "tenant_tokens_total", tenant="none", kind="generation") == 14


def test_rejected_request_is_not_counted_as_an_answer():
    metrics = made()
    metrics.begin("/v1/completions", ANN).end(None, Failure(400, "no", None, "invalid_value"))
    assert value(metrics, "requests_total", endpoint="/v1/completions", tenant="ann", status="400") == 1
    assert sum(v for (name, _), v in samples(metrics).items() if name == "inlay:request_success_total") == 0


def test_every_scrape_reads_the_engines_state():
    metrics = made()
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 4
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert (value(metrics, "kv_chunks"), value(metrics, "kv_chunks_used"), value(metrics, "kv_chunks_held")) == (
        40,
        30,
        10,
    )
    assert (value(metrics, "segments"), value(metrics, "stored_tokens"), value(metrics, "schemas")) == (7, 99, 1)
    assert (value(metrics, "num_preemptions_total"), value(metrics, "engine_steps_total")) == (2, 12)


def test_states_of_recurrent_layers_are_counted():
    metrics = made()
    names = ("state_slots", "state_slots_used", "states_stored", "state_bytes")
    assert [value(metrics, name) for name in names] == [16, 8, 5, 4096]
    names = ("state_hits_total", "state_hit_tokens_total", "state_evictions_total")
    assert [value(metrics, name) for name in names] == [9, 800, 3]


def test_draft_tokens_are_counted_by_source():
    counted = samples(made())
    for name, expected in (("draft_tokens_total", [5, 7, 0]), ("draft_tokens_accepted_total", [4, 0, 0])):
        assert [value(counted, name, source=source) for source in DRAFT_SOURCES] == expected


def test_divergence_is_counted_by_schema_and_policy():
    counted = samples(made())
    trip = {"schema": "trip", "policy": "modular"}
    parts = {"schema": "(messages)", "policy": "anchored"}
    buckets = {bound: value(counted, "drift_nats_bucket", le=bound, **trip) for bound in ("0.001", "0.1", "+Inf")}
    assert buckets == {"0.001": 0, "0.1": 3, "+Inf": 4}
    assert (value(counted, "drift_nats_sum", **trip), value(counted, "drift_nats_count", **trip)) == (0.61, 4)
    assert value(counted, "drift_nats_bucket", le="0.01", **parts) == 1
    assert value(counted, "drift_steps_total", **trip) == 20
    assert value(counted, "drift_agreeing_steps_total", **trip) == 15
    assert (value(counted, "drift_fallbacks", **trip), value(counted, "drift_fallbacks", **parts)) == (1, 0)
    assert (value(counted, "shadow_tokens_total"), value(counted, "shadow_seconds_total")) == (900, 1.5)
    assert [value(counted, "shadow_dropped_total", reason=why) for why in ("busy", "gone", "no room", "failed")] == [
        2,
        0,
        1,
        0,
    ]


def test_selection_passes_and_fallbacks_are_counted():
    metrics = made()
    output = finished([3], Usage(7, 5, 2, 0, 5, 0, recomputed_tokens=2, selecting_tokens=4))
    for each in (output, replace(output, reuse="exact", fell_back_from="modular")):
        metrics.begin("/v1/completions", ANN).end([each], None)
    assert value(metrics, "selecting_tokens_total") == 8
    assert value(metrics, "prompts_fell_back_total") == 1


def test_http_requests_are_counted_by_result():
    metrics = made()
    for status, error in (
        (200, None),
        (429, "rate_limit_exceeded"),
        (503, "stopping"),
        (504, "late"),
        (499, None),
        (None, None),
    ):
        metrics.http_began()
        assert value(metrics, "http_requests_in_flight") == 1
        metrics.http_ended(Line("1", "BREW", "/x", status=status, error=error))
        assert value(metrics, "http_requests_total", method="other", endpoint="unknown", status=str(status or 0)) == 1
    assert value(metrics, "http_requests_in_flight") == 0
    rejected = {labels for name, labels in samples(metrics) if name == "inlay:requests_rejected_total"}
    assert rejected == {frozenset({("reason", "rate_limit_exceeded")}), frozenset({("reason", "stopping")})}


def test_labels_are_bounded():
    metrics = made()
    for n in range(1_100):
        metrics.begin("/v1/completions", SimpleNamespace(name=f"tenant {n}")).end(None, None)
        metrics.http_ended(Line("1", "GET", "/", status=400, error=f"code_{n}"))
    tenants = {dict(labels)["tenant"] for name, labels in samples(metrics) if name == "inlay:requests_total"}
    reasons = {dict(labels)["reason"] for name, labels in samples(metrics) if name == "inlay:requests_rejected_total"}
    assert (len(tenants), len(reasons)) == (1_001, 65)
    assert "other" in tenants & reasons
    assert value(metrics, "requests_total", endpoint="/v1/completions", tenant="other", status="499") == 100


def test_server_overhead_is_counted_by_step():
    metrics = made()
    for number, step in enumerate(STEPS, 1):
        metrics.overhead(step, number / 1000)
    for number, step in enumerate(STEPS, 1):
        assert value(metrics, "server_overhead_seconds_sum", step=step) == pytest.approx(number / 1000)


@given(st.integers(1, 10**7))
def test_buckets_of_tokens_reach_the_longest_context(longest):
    bounds = token_buckets(longest)
    assert bounds == sorted(set(bounds))
    assert bounds[0] == 1
    assert bounds[-1] <= longest < bounds[-1] * 2.5
    assert all(str(bound)[0] in "125" and set(str(bound)[1:]) <= {"0"} for bound in bounds)


def test_the_page_lists_every_metric_and_no_other():
    listed = {}
    for header in ("metric, as in vLLM", "metric of inlay"):
        for names, kind, says in rows(PAGE, header, "type", "what it says"):
            assert says
            for name in re.findall(r"`([\w:]+)`", names):
                listed[name] = (kind.split()[0], frozenset(re.findall(r"`(\w+)`", kind)))
    metrics = made()
    watch = metrics.begin("/v1/completions", ANN)
    watch.end(None, None)
    metrics.http_ended(Line("1", "GET", "/", status=400))
    live = {}
    for family in parse_text(metrics.render().decode()):
        if family.name.startswith("inlay:"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le", "model_name", "engine"}
            assert all("model_name" in sample.labels for sample in family.samples), family.name
            live[family.name + "_total" * (family.type == "counter")] = (family.type, frozenset(labels))
    assert listed == live


def test_vllms_dashboard_finds_all_its_metrics():
    """Under vLLM's prefix, without a word of configuration."""
    found: dict[str, set[str]] = {}
    for name, labels in samples(made()):
        found.setdefault(name, set()).update({"model_name"} | {label for label, _ in labels})
    for name, labels in DASHBOARD.items():
        assert found[f"vllm:{name}"] == labels, name


def test_vllm_metrics_are_exported_under_both_prefixes():
    metrics = made()
    watch = metrics.begin("/v1/completions", ANN)
    watch.tokens(3)
    watch.end([finished([3], Usage(7, 5, 2, 5, 0, 0))], None)
    families = {family.name: family for family in parse_text(metrics.render().decode())}
    listed = {
        name.strip("`").removesuffix("_total") for name, *_ in rows(PAGE, "metric, as in vLLM", "type", "what it says")
    }
    twins = {name for name in families if name.startswith("vllm:")}
    assert {name.replace("vllm:", "inlay:") for name in twins} == listed
    for name in twins:
        own, twin = families[name.replace("vllm:", "inlay:")], families[name]
        assert (twin.type, twin.documentation) == (own.type, own.documentation)
        assert [(sample.labels, sample.value) for sample in twin.samples] == [
            (sample.labels, sample.value) for sample in own.samples
        ]
        assert {sample.labels["engine"] for sample in twin.samples} == {"0"}
    assert value(metrics, "prompt_tokens_total") == 7


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    llm = model()
    with TestClient(server(service(llm))) as client:
        yield client
    llm.shutdown()


def test_metrics_are_for_admins(client):
    assert client.get("/metrics").status_code == 401
    refused = client.get("/metrics", headers={"Authorization": "Bearer ann"})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_only"
    answered = client.get("/metrics", headers={"Authorization": "Bearer root"})
    assert answered.status_code == 200
    assert answered.headers["content-type"].startswith("text/plain; version=")
    counted = [sample for family in parse_text(answered.text) for sample in family.samples]
    refusals = [s for s in counted if s.name == "inlay:http_requests_total" and s.labels["status"] == "403"]
    assert [sample.labels["endpoint"] for sample in refusals] == ["/metrics"]


def test_metrics_equal_the_usage_of_real_requests():
    schema = Schema.from_string('<schema name="s">Always. <module name="a">A module of some length.</module></schema>')

    async def run() -> tuple[Metrics, list[RequestOutput]]:
        llm = model()
        metrics = Metrics(llm, model_name="demo", longest=2048, schemas=())
        await llm.add_schema(schema, reuse="isolated")
        ended = []
        for reuse in ("off", "exact", "exact", "anchored", "isolated"):
            watch = metrics.begin("/v1/completions", ANN)
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            said = 0
            async for output in llm.generate(schema.prompt().use("a").text("?"), params, reuse=reuse):
                now = len(output.outputs[0].token_ids)
                watch.tokens(now - said)
                said = now
            watch.end([output], None)
            ended.append(output)
        counted = samples(metrics)
        stats = llm.stats()
        assert counted["inlay:segments", frozenset()] == stats.segments > 0
        assert counted["inlay:engine_steps_total", frozenset()] == stats.steps > 0
        llm.shutdown()
        return metrics, ended

    metrics, ended = asyncio.run(run())
    assert value(metrics, "generation_tokens_total") == 30
    assert value(metrics, "request_success_total", finished_reason="length") == 5
    for source in ("exact", "module", "computed"):
        total = sum(getattr(output.usage, f"{source}_tokens") for output in ended)
        assert value(metrics, "prompt_tokens_by_source_total", source=source) == total > 0
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_decode_time_seconds"):
        assert value(metrics, f"{name}_count") == 5
