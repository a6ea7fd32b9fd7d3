"""OpenTelemetry traces: a span for each request, with its phases as children.

Spans are made at the end of a request, from its metrics, so a running request costs nothing. A thread sends them. The
names and attributes are those of OpenTelemetry's conventions for generative AI and of vLLM. A span never has a prompt
or an answer. The packages come with ``pip install 'inlay-llm[otel]'``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from inlay.api.failures import Failure
from inlay.errors import ParameterError
from inlay.types import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from inlay.server.live_requests import LiveRequest, Row

_PARENT = ("traceparent", "tracestate")  # headers of W3C's trace context
_MOST_PROMPTS = 16  # of one request that get phases
_EXPORT_S = 3  # for one batch of spans, and for the last one at the end of the process


class Phase(NamedTuple):
    """A phase of a prompt, in seconds from the request's arrival."""

    name: str
    start: float
    end: float


def check_endpoint(endpoint: str | None) -> None:
    """Raise ParameterError if traces cannot be sent to this address, or the packages for them are missing."""
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ParameterError(
            f"otlp_traces_endpoint is {endpoint!r:.200}; write an address like http://127.0.0.1:4318/v1/traces"
        )
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ParameterError(
            "otlp_traces_endpoint needs OpenTelemetry; run pip install 'inlay-llm[otel]'",
            code="parameter.missing_package",
        )


def phases(metrics: RequestMetrics) -> Iterator[Phase]:
    """Yield the known phases of a prompt, in order: queue, load, encode, prefill, decode.

    A phase that has not begun is left out, and so are ``load`` and ``encode`` without any time.
    """
    if metrics.queue_s is None:
        return
    yield Phase("queue", 0.0, metrics.queue_s)
    admitted = metrics.queue_s + metrics.fetch_s
    if metrics.fetch_s:
        yield Phase("load", metrics.queue_s, admitted)
    if metrics.ttft_s is None:
        return
    encoded = min(admitted + metrics.encode_s, metrics.ttft_s)
    if metrics.encode_s:
        yield Phase("encode", admitted, encoded)
    yield Phase("prefill", encoded, metrics.ttft_s)
    if metrics.total_s is not None:
        yield Phase("decode", metrics.ttft_s, max(metrics.ttft_s, metrics.total_s))


class Traces:
    """Sends the traces of a server to a collector, by OTLP over HTTP.

    The environment variables of OpenTelemetry's SDK set the rest, such as OTEL_SERVICE_NAME,
    OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER.

    Args:
        endpoint: the address of the collector.
    """

    def __init__(self, endpoint: str) -> None:
        check_endpoint(endpoint)
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        import inlay

        resource = Resource.create({"service.name": "inlay", "service.version": inlay.__version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._batches = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._batches)
        self._tracer = self._provider.get_tracer("inlay", inlay.__version__)
        self._ended_span = ReadableSpan
        self._context = TraceContextTextMapPropagator()
        self._trace = trace

    def record(self, live: LiveRequest, row: Row, failure: Failure | None, headers: Mapping[str, str]) -> None:
        """Record a request that has just ended.

        Args:
            live: the request.
            row: its entry in the list of requests.
            failure: the error that replaced or ended its answer; None for none.
            headers: of the request. With ``traceparent``, its span belongs to the client's trace.
        """
        outputs, end = live.usage.outputs, time.time_ns()
        start = end - round((time.perf_counter() - live.arrival) * 1e9)
        carrier = {name: headers[name] for name in _PARENT if name in headers}
        span = self._tracer.start_span(
            "llm_request",
            self._context.extract(carrier),
            self._trace.SpanKind.SERVER,
            start_time=start,
        )
        if not span.is_recording():  # it is not sampled
            return
        span.set_attributes(_attributes(live, row, outputs))
        if failure is not None:
            span.set_attribute("error.type", failure.name)
            if failure.status >= 500:
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, failure.name))
        for number, output in enumerate(outputs[:_MOST_PROMPTS]):
            counts = _phase_attributes(output)
            for phase in phases(output.metrics):
                attributes = {"inlay.prompt": number, **counts.get(phase.name, {})}
                self._end_phase(span, phase, attributes, start)
        span.end(end)

    def _end_phase(self, parent: Any, phase: Phase, attributes: dict[str, int], start: int) -> None:
        """Send a span of a phase that has ended.

        A tracer would sample the phase again and copy its attributes, which takes four times as long.

        Args:
            parent: the span of the request.
            start: the arrival of the request, in nanoseconds since 1970.
        """
        inside = parent.get_span_context()
        span_id = self._provider.id_generator.generate_span_id()
        span = self._ended_span(
            phase.name,
            self._trace.SpanContext(inside.trace_id, span_id, False, inside.trace_flags, inside.trace_state),
            inside,
            self._provider.resource,
            attributes,
            start_time=start + round(phase.start * 1e9),
            end_time=start + round(phase.end * 1e9),
            instrumentation_scope=parent.instrumentation_scope,
        )
        self._batches.on_end(span)

    def close(self) -> None:
        """Send the last spans. It takes at most some seconds."""
        self._provider.shutdown()


def _attributes(live: LiveRequest, told: Row, outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return the attributes of a request's span."""
    request = live.request
    found: dict[str, Any] = {
        "http.route": live.endpoint,
        "inlay.tenant": live.tenant.name,
        "gen_ai.usage.input_tokens": told["prompt_tokens"] or 0,
        "gen_ai.usage.output_tokens": told["generated_tokens"],
        "gen_ai.latency.e2e": told["seconds"],
    }
    if request is not None:
        params = request.call.params
        found |= {
            "gen_ai.request.id": request.name,
            "gen_ai.request.model": request.model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "inlay.reuse": told["reuse"],
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
    if outputs:
        found |= {f"inlay.{name}": told[name] for name in ("exact_tokens", "module_tokens", "computed_tokens")}
        timing = told["timing"]
        names = {"time_in_queue": "queue_s", "time_to_first_token": "ttft_s"}
        found |= {f"gen_ai.latency.{name}": timing[of] for name, of in names.items() if timing[of] is not None}
        reasons = [str(answer.finish_reason) for output in outputs for answer in output.outputs if answer.finish_reason]
        found["gen_ai.response.finish_reasons"] = reasons[:_MOST_PROMPTS]
    return {name: value for name, value in found.items() if value is not None}


def _phase_attributes(output: RequestOutput) -> dict[str, dict[str, int]]:
    """Return the attributes of the phases of a prompt, by phase."""
    usage = output.usage
    loaded = {
        f"inlay.{tier}_tokens": tokens
        for tier in ("host", "disk", "shared")
        if (tokens := getattr(usage, f"{tier}_tokens"))
    }
    return {
        "load": {"inlay.cached_tokens": usage.cached_tokens, **loaded},
        "prefill": {"inlay.computed_tokens": usage.computed_tokens, "inlay.recomputed_tokens": usage.recomputed_tokens},
        "decode": {"gen_ai.usage.output_tokens": sum(len(answer.token_ids) for answer in output.outputs)},
    }
