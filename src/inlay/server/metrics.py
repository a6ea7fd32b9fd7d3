"""Prometheus metrics of requests, the engine and the server. ``GET /metrics`` serves them to admins.

The tokens and log-probabilities of a request are estimated before it runs, and then its usage is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from inlay.api.call import Call
from inlay.api.failures import BodyError, Failure
from inlay.pml import Import, ImportSet, Prompt, PromptTurn, Text
from inlay.pml.rules import names_of, path_of
from inlay.sampling.params import SamplingParams
from inlay.server.limits import Tenant
from inlay.server.logs import Line, current_line
from inlay.server.metric_families import (
    ENGINE,
    IN_VLLM,
    PREFIX,
    VLLM_PREFIX,
    EngineCollector,
    Families,
    Step,
)
from inlay.types import RequestOutput

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM
    from inlay.prompt.layout import SchemaLayout


_METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
_OTHER = "other"
_NOBODY = "none"  # the tenant label of a request without a tenant
_MOST_TENANTS = 1_000
_MOST_REASONS = 64
_MOST_ASKED = 2**31  # tokens; a larger max_tokens counts as this
_CLIENT_LEFT = 499

#: The only format. In OpenMetrics, prometheus-client writes other names (an underscore for the colon).
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter()


class Metrics:
    """All metrics of one server.

    Args:
        engine: read at every scrape.
        model_name: the label of all series.
        longest: tokens of the model's context.
        schemas: its length is the number of schemas on the server.
    """

    def __init__(self, engine: AsyncLLM, *, model_name: str, longest: int, schemas: Sized) -> None:
        self._registry = CollectorRegistry()
        self._tenants = _Bounded(_MOST_TENANTS)
        self._reasons = _Bounded(_MOST_REASONS)
        self._model = model_name
        self._families = Families(self._registry, model_name, longest)
        self._registry.register(EngineCollector(engine, schemas, model_name))
        ProcessCollector(registry=self._registry)

    def register(self, collector: Collector) -> None:
        """Add another collector to the metrics."""
        self._registry.register(collector)

    def begin(self, endpoint: str, tenant: Tenant | None) -> RequestObserver:
        """Return the observer of a request for answers that has arrived at this path."""
        name = _NOBODY if tenant is None else self._tenants.label(tenant.name)
        return RequestObserver(self._families, self._model, endpoint, name)

    def overhead(self, step: Step, seconds: float) -> None:
        """Record the seconds that the server itself took for a step of a request."""
        self._families.overhead[step].observe(seconds)

    def http_began(self) -> None:
        """See logs.LogCounter."""
        self._families.in_flight.inc()

    def http_ended(self, line: Line) -> None:
        """See logs.LogCounter. A response with 4xx or 503 counts as a refusal, with the error's code as reason."""
        self._families.in_flight.dec()
        method = line.method if line.method in _METHODS else _OTHER
        status = line.status or 0
        self._families.http.labels(self._model, ENGINE, method, line.endpoint, str(status)).inc()
        if (400 <= status < 500 and status != _CLIENT_LEFT) or status == 503:
            self._families.rejected.labels(self._model, ENGINE, self._reasons.label(line.error or _OTHER)).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, of type CONTENT_TYPE."""
        return generate_latest(_Sent(self._registry))


class RequestObserver:
    """Observes one request for answers, from its arrival.

    Call ``asked`` when its parameters are known, ``tokens`` (or ``first_token``) when tokens arrive, and ``end`` once.
    The end counts the request and writes its numbers into the request's log line.
    """

    def __init__(self, families: Families, model: str, endpoint: str, tenant: str) -> None:
        self._families = families
        self._model = model
        self._endpoint = endpoint
        self._tenant = tenant
        self._line = current_line()
        self._began = time.perf_counter()
        self._first: float | None = None  # on the clock of _began
        self._last: float | None = None
        self._said = 0
        self._ended = False

    def asked(self, params: SamplingParams) -> None:
        """Record the sampling parameters of its prompts."""
        self._families.asked_answers.observe(params.n)
        if params.max_tokens is not None:
            self._families.asked_tokens.observe(min(params.max_tokens, _MOST_ASKED))

    def first_token(self) -> None:
        """Record the first token of any of its answers. Only the first call counts."""
        if self._first is None:
            self._first = time.perf_counter()
            self._families.first_token.observe(self._first - self._began)

    def tokens(self, count: int, steps: int = 1) -> None:
        """Record new tokens of all its answers, the first ones included.

        Args:
            count: the tokens that arrived together.
            steps: the model's steps that made them. The time since the last tokens is divided among these steps.
        """
        if not count:
            return
        now = time.perf_counter()
        self.first_token()
        if self._last is not None:
            for _ in range(steps):
                self._families.between_tokens.observe((now - self._last) / steps)
        self._last = now
        self._said += count
        self._families.generation_tokens.inc(count)

    def end(self, outputs: Sequence[RequestOutput] | None, failure: Failure | None) -> None:
        """Record the end. Further calls change nothing, so a ``finally`` block may call it.

        Args:
            outputs: the latest output of each prompt, finished or not; None if there is none.
            failure: the error that replaced the answer or ended its stream; None on success, or if the client left.
        """
        if self._ended:
            return
        self._ended = True
        outputs = outputs or ()
        whole = failure is None and bool(outputs) and all(output.finished for output in outputs)
        status = failure.status if failure is not None else 200 if whole else _CLIENT_LEFT
        self._families.requests.labels(self._model, ENGINE, self._endpoint, self._tenant, str(status)).inc()
        for output in outputs:
            self._count_prompt(output)
        self._count_said(outputs)
        if whole:
            self._families.latency.observe(time.perf_counter() - self._began)
            for output in outputs:
                self._count_times(output)
        for reason in _reasons(outputs, status):
            self._families.success.labels(self._model, ENGINE, reason).inc()
        self._tell(outputs, failure, whole)

    def _count_prompt(self, output: RequestOutput) -> None:
        usage, made = output.usage, self._families
        made.prompt_tokens.inc(usage.prompt_tokens)
        made.prefix_queries.inc(usage.prompt_tokens)
        made.prefix_hits.inc(usage.cached_tokens)
        made.cached_tokens.inc(usage.cached_tokens)
        made.source["computed"].inc(usage.computed_tokens)
        made.source["exact"].inc(usage.exact_tokens)
        made.source["module"].inc(usage.module_tokens)
        made.shifted_tokens.inc(usage.shifted_tokens)
        made.duplicate_tokens.inc(usage.duplicate_tokens)
        made.recomputed_tokens.inc(usage.recomputed_tokens)
        made.selecting_tokens.inc(usage.selecting_tokens)
        made.fell_back.inc(output.fell_back_from is not None)
        for reason, tokens in usage.misses:
            made.missed_tokens[reason].inc(tokens)
        for kind, tokens in (("prompt", usage.prompt_tokens), ("cached", usage.cached_tokens)):
            made.tenant_tokens.labels(self._model, ENGINE, self._tenant, kind).inc(tokens)

    def _count_said(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the tokens of answers, including those that ``tokens`` has not counted."""
        said = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        self._families.generation_tokens.inc(max(0, said - self._said))
        self._families.tenant_tokens.labels(self._model, ENGINE, self._tenant, "generation").inc(max(said, self._said))

    def _count_times(self, output: RequestOutput) -> None:
        """Record the times and lengths of a prompt with complete answers."""
        made, spent = self._families, output.metrics
        lengths = [len(answer.token_ids) for answer in output.outputs]
        made.prompt_length.observe(output.usage.prompt_tokens)
        made.longest_answer.observe(max(lengths))
        for length in lengths:
            made.answer_length.observe(length)
        made.fetch.observe(spent.fetch_s)
        if spent.ttft_s is None or spent.total_s is None:
            return
        decode, queue = spent.total_s - spent.ttft_s, spent.queue_s or 0.0
        if self._first is None:
            made.first_token.observe(spent.ttft_s)
        made.queue.observe(queue)
        made.prefill.observe(spent.ttft_s - queue)
        made.decode.observe(decode)
        made.inference.observe(spent.total_s - queue)
        if max(lengths) > 1:
            made.per_token.observe(decode / (max(lengths) - 1))

    def _tell(self, outputs: Sequence[RequestOutput], failure: Failure | None, whole: bool) -> None:
        """Write the numbers into the log line."""
        line = self._line
        if line is None:
            return
        first = [output.metrics.ttft_s for output in outputs if output.metrics.ttft_s is not None]
        line.ttft_s = self._first - self._began if self._first is not None else min(first, default=None)
        if outputs:
            line.prompt_tokens = sum(output.usage.prompt_tokens for output in outputs)
            line.cached_tokens = sum(output.usage.cached_tokens for output in outputs)
            line.module_tokens = sum(output.usage.module_tokens for output in outputs)
            line.generated_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        if whole:
            line.finish_reasons = tuple(_reasons(outputs, 200))
        elif failure is None:
            line.disconnected = True
        else:
            line.error = failure.name


def _reasons(outputs: Sequence[RequestOutput], status: int) -> list[str]:
    """Return the finish reasons in vLLM's words; none for a refused request."""
    if status == 200:
        return [str(answer.finish_reason) for output in outputs for answer in output.outputs]
    if status == _CLIENT_LEFT:
        return ["abort"]
    return ["error"] if status >= 500 else []


class _Bounded:
    """Limits a label to a number of values. Later values become "other"."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return _OTHER
        self._known.add(value)
        return value


class _Sent(Collector):
    """A registry as it is sent, with a copy of vLLM's metrics under vLLM's prefix.

    It drops ``_created`` series, which no dashboard reads and which would double the size.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
            if metric.name.removeprefix(PREFIX) in IN_VLLM:
                yield _as_in_vllm(metric)


def _as_in_vllm(metric: Metric) -> Metric:
    twin = Metric(_vllm_name(metric.name), metric.documentation, metric.type)
    twin.samples = [sample._replace(name=_vllm_name(sample.name)) for sample in metric.samples]
    return twin


def _vllm_name(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(PREFIX)


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """All metrics. On a server with keys only admins may read them, because the series name the tenants."""
    tenant: Tenant = request.state.tenant
    if not tenant.admin:
        raise BodyError("metrics cover all tenants; send an admin's key", code="admin_only", status=403)
    return Response(request.app.state.service.metrics.render(), media_type=CONTENT_TYPE)


#: The number of a prompt, and the latest output for it.
Update = tuple[int, RequestOutput]

#: Per request, alternatives included. Each takes about 60 bytes of a response, and several times that before it is
#: sent.
MAX_LOGPROBS = 2**18

_BYTES_A_TOKEN = 4  # a rough estimate for UTF-8; the exact number is known after layout


def within_logprobs(call: Call, longest: int) -> Call:
    """Return the call with max_tokens lowered to fit MAX_LOGPROBS, if the request does not set max_tokens.

    Args:
        call: the request.
        longest: tokens of the model's context.

    Raises:
        BodyError: the request sets max_tokens, and asks for more than MAX_LOGPROBS log-probabilities.
    """
    params = call.params
    if params.logprobs is None:
        return call
    wide = call.answers * (1 + params.logprobs)
    most = max(1, MAX_LOGPROBS // wide)
    wanted = _longest_answer(params, longest)
    if wanted <= most:
        return call
    if call.said_max_tokens:
        raise BodyError(
            f"the request asks for {wide * wanted:,} log-probabilities (answers × tokens × alternatives), and one may "
            f"have {MAX_LOGPROBS:,}; ask for at most {most:,} tokens, or for fewer answers or alternatives",
            param="logprobs",
        )
    return replace(call, params=replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most)))


def check_prompt_logprobs(call: Call, llm: AsyncLLM, tenant: Tenant) -> None:
    """Raise BodyError if a call asks for more prompt log-probabilities than MAX_LOGPROBS, by a rough estimate."""
    scored = call.params.prompt_logprobs
    if scored is None:
        return
    tokens, wide = _prompts_tokens(call, llm, tenant), (1 + scored) * (call.params.n if call.echo else 1)
    if tokens * wide > MAX_LOGPROBS:
        raise BodyError(
            f"the request asks for about {tokens * wide:,} log-probabilities of its prompts (tokens × alternatives), "
            f"and one may have {MAX_LOGPROBS:,}; split it into several requests, or ask for fewer alternatives",
            param="prompt_logprobs" if call.scores is not None else "logprobs",
        )


def tokens_of(call: Call, llm: AsyncLLM, tenant: Tenant) -> int:
    """Estimate the tokens that a call may use: its prompts, by their text, and answers of the greatest length."""
    longest = llm.client.model.max_positions
    answers = call.answers * _longest_answer(call.params, longest)
    return answers + _prompts_tokens(call, llm, tenant)


def _prompts_tokens(call: Call, llm: AsyncLLM, tenant: Tenant) -> int:
    longest = llm.client.model.max_positions
    return sum(min(longest, _prompt_tokens(prompt, llm, tenant)) for prompt in call.prompts)


def text_tokens(text: str) -> int:
    """Estimate the tokens of a text."""
    return -(-len(text.encode(errors="replace")) // _BYTES_A_TOKEN)


def _longest_answer(params: SamplingParams, longest: int) -> int:
    return longest if params.max_tokens is None else min(params.max_tokens, longest)


def _prompt_tokens(prompt: Any, llm: AsyncLLM, tenant: Tenant) -> int:
    if isinstance(prompt, Prompt):
        layout = llm.schema(prompt.schema, cache_salt=tenant.salt)
        always = 0 if layout is None else sum(len(run.ids) for run in layout.runs if not run.owner)
        return always + _nodes_tokens(prompt.children, layout, ())
    if isinstance(prompt, str):
        return text_tokens(prompt)
    if isinstance(prompt, Mapping):
        return sum(_prompt_tokens(value, llm, tenant) for value in prompt.values())
    if isinstance(prompt, Sequence):
        ids = bool(prompt) and isinstance(prompt[0], int)
        return len(prompt) if ids else sum(_prompt_tokens(one, llm, tenant) for one in prompt)
    return 1


def _nodes_tokens(
    nodes: Sequence[Text | Import | ImportSet | PromptTurn], layout: SchemaLayout | None, around: tuple[str, ...]
) -> int:
    """Estimate the tokens of a prompt's texts and imports. Unknown names count nothing and are refused later.

    Args:
        nodes: the nodes of the prompt.
        layout: the schema's layout; None if the schema is unknown.
        around: the names of the modules around these nodes.
    """
    total = 0
    for node in nodes:
        if isinstance(node, Text):
            total += text_tokens(node.text)
            continue
        if isinstance(node, ImportSet):
            total += _nodes_tokens(node.imports, layout, around)
            continue
        inside = around
        if isinstance(node, Import):
            inside = (*around, *names_of(node.name))
            total += sum(text_tokens(one.value) for one in node.arguments)
            for depth in range(len(around) + 1, len(inside) + 1):  # a path also imports the modules around it
                extent = None if layout is None else layout.extents.get(path_of(inside[:depth]))
                total += 0 if extent is None else extent.tokens
        total += _nodes_tokens(node.children, layout, inside)
    return total


class RequestUsage:
    """The usage of one request so far, for the metrics, the log line and the tenant's limits.

    It exists while the request is answered. Call ``end`` once.
    """

    def __init__(self, metrics: Metrics, endpoint: str, tenant: Tenant) -> None:
        self._metrics = metrics
        self._observer = metrics.begin(endpoint, tenant)
        self._outputs: dict[int, RequestOutput] = {}  # the latest output of each prompt
        self._said: dict[tuple[int, int], int] = {}  # tokens of each answer, by prompt and choice
        self.said = 0  # tokens of all answers
        self._asked_at = 0.0
        self._took: dict[Step, float] = {}

    @property
    def outputs(self) -> list[RequestOutput]:
        """The latest output of each prompt that has one."""
        return [output for _, output in sorted(self._outputs.items())]

    @property
    def tokens(self) -> int:
        """The tokens of prompts and answers."""
        return self.said + sum(output.usage.prompt_tokens for output in self._outputs.values())

    def asked(self, params: SamplingParams) -> None:
        """Record that the request is sent to the engine now."""
        self._observer.asked(params)
        self._asked_at = time.perf_counter()

    def note(self, changed: Sequence[Update]) -> None:
        """Count new updates of the engine."""
        if not self._outputs:
            # The rest of the time is not the engine's: layout, and the transfer in both directions.
            ttft_s = changed[0][1].metrics.ttft_s or 0.0
            self.took("lay_out", max(0.0, time.perf_counter() - self._asked_at - ttft_s))
        self._outputs.update(changed)
        more = []
        for number, output in changed:
            for answer in output.outputs:
                at, tokens = (number, answer.index), len(answer.token_ids)
                more.append(tokens - self._said.get(at, 0))
                self._said[at] = tokens
        self.said += sum(more)
        self._observer.tokens(sum(more), steps=max(more, default=0))

    def took(self, step: Step, seconds: float) -> None:
        """Add the seconds that the server itself took for a step."""
        self._took[step] = self._took.get(step, 0.0) + seconds

    def end(self, failure: Failure | None) -> None:
        """Record the end of the request. ``failure`` is the error that replaced or ended the answer."""
        for step, seconds in self._took.items():
            self._metrics.overhead(step, seconds)
        self._observer.end(self.outputs, failure)
