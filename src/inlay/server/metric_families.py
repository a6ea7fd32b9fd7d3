"""All metrics of the server, with their names, labels and buckets.

If vLLM has a metric, its name after the prefix, its labels and its buckets are the same here (docs/usage/metrics.md and
vllm/v1/metrics in vLLM). Such a metric is also sent under vLLM's prefix, for vLLM's dashboards and autoscalers.
docs/reference/metrics.md has the table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.types import (
    DIVERGENCE_BOUNDS,
    DRAFT_SOURCES,
    DROP_REASONS,
    MISS_REASONS,
    EngineStats,
    ShadowStats,
    TierStats,
)

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM

PREFIX = "inlay:"
VLLM_PREFIX = "vllm:"

#: The ``engine`` label of all series. vLLM numbers several engines; here there is one.
ENGINE = "0"

#: Metrics that vLLM has with the same name, labels, meaning and buckets. Counters lack their ``_total``.
IN_VLLM = frozenset(
    (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
        "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
        "request_params_max_tokens",
    )
)  # fmt: skip
STEPS = ("read", "translate", "lay_out", "respond", "write", "trace")
REASONS = ("stop", "length", "abort", "error")
Step = Literal["read", "translate", "lay_out", "respond", "write", "trace"]

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ANSWERS = (1, 2, 5, 10, 20)
_OVERHEAD = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 1.0)


def token_buckets(most: int) -> list[int]:
    """Return the buckets 1, 2, 5, 10, 20, 50 … up to the longest context of the model."""
    series = (mantissa * 10**exponent for exponent in range(len(str(most))) for mantissa in (1, 2, 5))
    return [bound for bound in series if bound <= most]


class Families:
    """All metrics that requests write to. Metrics without labels of their own are bound to the model's name.

    Args:
        longest: the length of the model's context in tokens.
    """

    def __init__(self, registry: CollectorRegistry, model: str, longest: int) -> None:
        made = _Maker(registry, model)
        count, time, sizes = made.counter, made.histogram, partial(made.histogram, buckets=token_buckets(longest))
        success: Counter = made.labelled(Counter, "request_success", "Answers by how they ended.", "finished_reason")
        for reason in REASONS:  # a rate needs a zero to start from
            success.labels(model, ENGINE, reason)
        missed = made.labelled(Counter, "module_tokens_missed", "Module tokens that were nowhere.", "reason")
        source = made.labelled(
            Counter, "prompt_tokens_by_source", "Prompt tokens by how their KV came about.", "source"
        )
        overhead = made.labelled(
            Histogram, "server_overhead_seconds", "Time of the server itself, by step.", "step", buckets=_OVERHEAD
        )
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of requests that ran.")
        self.generation_tokens = count("generation_tokens", "Tokens of answers.")
        self.prefix_queries = count("prefix_cache_queries", "Prompt tokens, under whatever policy.")
        self.prefix_hits = count("prefix_cache_hits", "Prompt tokens that were found there.")
        self.cached_tokens = count("prompt_tokens_cached", "Prompt tokens whose KV came from the cache.")
        self.shifted_tokens = count("prompt_tokens_shifted", "Cached tokens that were read at another offset.")
        self.missed_tokens = {reason: missed.labels(model, ENGINE, reason) for reason in MISS_REASONS}
        self.duplicate_tokens = count("prompt_tokens_recomputed", "Computed tokens whose KV had been computed before.")
        self.recomputed_tokens = count("prompt_tokens_repaired", "Module tokens recomputed by selective recomputation.")
        self.selecting_tokens = count("selecting_tokens", "Passes of one token made to choose recomputed tokens.")
        self.fell_back = count("prompts_fell_back", "Prompts that got a safer policy than they asked for.")
        self.first_token = time(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN
        )
        self.between_tokens = time("inter_token_latency_seconds", "Between two pieces of an answer.", _BETWEEN_TOKENS)
        self.per_token = time(
            "request_time_per_output_token_seconds", "Mean time per token behind the first one.", _BETWEEN_TOKENS
        )
        self.latency = time(
            "e2e_request_latency_seconds", "From a request's arrival to the end of its answer.", _REQUEST
        )
        self.queue = time("request_queue_time_seconds", "In line for a place.", _REQUEST)
        self.prefill = time("request_prefill_time_seconds", "From its place to its first token.", _REQUEST)
        self.decode = time("request_decode_time_seconds", "From its first token to its last.", _REQUEST)
        self.inference = time("request_inference_time_seconds", "From its place to its last token.", _REQUEST)
        self.fetch = time("request_fetch_time_seconds", "For finding and laying out what is stored.", _FIRST_TOKEN)
        self.prompt_length = sizes("request_prompt_tokens", "Tokens of a prompt.")
        self.answer_length = sizes("request_generation_tokens", "Tokens of an answer.")
        self.longest_answer = sizes("request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.")
        self.asked_answers = made.histogram("request_params_n", "The parameter n.", _ANSWERS)
        self.asked_tokens = sizes("request_params_max_tokens", "The parameter max_tokens, where it was given.")
        self.in_flight = made.gauge("http_requests_in_flight", "HTTP requests that are being answered.")
        self.source = {name: source.labels(model, ENGINE, name) for name in ("computed", "exact", "module")}
        self.overhead = {step: overhead.labels(model, ENGINE, step) for step in STEPS}
        self.success = success
        self.requests: Counter = made.labelled(
            Counter, "requests", "Requests for answers by how they ended.", "endpoint", "tenant", "status"
        )
        self.tenant_tokens: Counter = made.labelled(Counter, "tenant_tokens", "Tokens by tenant.", "tenant", "kind")
        self.http: Counter = made.labelled(
            Counter, "http_requests", "HTTP requests that ended.", "method", "endpoint", "status"
        )
        self.rejected: Counter = made.labelled(
            Counter, "requests_rejected", "HTTP requests that were refused.", "reason"
        )


class _Maker:
    """Creates metrics whose first labels are the model's name and the engine."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def counter(self, name: str, says: str) -> Counter:
        counter: Counter = self.labelled(Counter, name, says).labels(self._model, ENGINE)
        return counter

    def gauge(self, name: str, says: str) -> Gauge:
        gauge: Gauge = self.labelled(Gauge, name, says).labels(self._model, ENGINE)
        return gauge

    def histogram(self, name: str, says: str, buckets: Sequence[float]) -> Histogram:
        histogram: Histogram = self.labelled(Histogram, name, says, buckets=buckets).labels(self._model, ENGINE)
        return histogram

    def labelled(self, kind: type[Any], name: str, says: str, *labels: str, **settings: Any) -> Any:
        names = ("model_name", "engine", *labels)
        return kind(PREFIX + name, says, labelnames=names, registry=self._registry, **settings)


_IN_PARTS = "(messages)"  # no schema can have this name

#: Reasons that a tier did not return a segment; see kv/offload/tier.py.
STORE_MISSES = ("absent", "corrupt", "late", "failed")


#: The metrics of the engine's statistics, by their source: name, help, and field of the source.
GAUGES: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "engine": (
        ("num_requests_running", "Answers that are being computed.", "running"),
        ("num_requests_waiting", "Answers that wait for a place.", "waiting"),
        ("kv_chunks", "Chunks of the KV pool.", "chunks"),
        ("kv_chunks_used", "Chunks in which anything lies.", "used_chunks"),
        ("kv_chunks_held", "Chunks that running requests need.", "held_chunks"),
        ("pinned_bytes", "Bytes of the KV pool that pins take.", "pinned_bytes"),
        ("segments", "Segments in the store.", "segments"),
        ("stored_tokens", "Tokens in the store.", "stored_tokens"),
        ("state_slots", "Slots for the states of recurrent layers.", "state_slots"),
        ("state_slots_used", "Slots of running requests and stored states.", "used_state_slots"),
        ("states_stored", "Stored states.", "states"),
        ("state_bytes", "Bytes of all slots.", "state_bytes"),
        ("store_unwritten_segments", "Segments that wait to be written.", "unwritten_segments"),
        ("store_write_lag_seconds", "For how long the first of them has waited.", "write_lag_s"),
    ),
    "host": (
        ("host_segments", "Segments in the memory of the host, below the KV pool of a device.", "segments"),
        ("host_bytes", "Bytes of that memory that they take.", "bytes"),
        ("host_quota_bytes", "The most that they may take.", "quota"),
    ),
    "disk": (
        ("store_segments", "Segments on disk.", "segments"),
        ("store_bytes", "Bytes of their files.", "bytes"),
        ("store_quota_bytes", "The most that they may have.", "quota"),
    ),
    "shared": (("shared_store_up", "Whether there is a shared store that can be asked.", "up"),),
}
COUNTERS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "engine": (
        ("num_preemptions", "Times that an answer lost its place to make room.", "preemptions"),
        ("engine_steps", "Forward passes.", "steps"),
        ("profiled_tokens", "Tokens computed in idle time for profiles of modules.", "profiled_tokens"),
        ("profile_seconds", "How long that took.", "profile_s"),
        ("promoted_tokens", "Tokens computed in idle time of what is asked for again.", "promoted_tokens"),
        ("promotion_seconds", "How long that took.", "promotion_s"),
        ("encoded_tokens", "Tokens of modules that were computed.", "encoded_tokens"),
        ("state_hits", "Admissions that continued a stored state.", "state_hits"),
        ("state_hit_tokens", "Tokens in front of these states.", "state_hit_tokens"),
        ("state_evictions", "Stored states that were removed to make room.", "state_evictions"),
    ),
    "shadow": (
        ("shadow_tokens", "Tokens computed in idle time to compare answers with full prefill.", "tokens"),
        ("shadow_seconds", "How long that took.", "seconds"),
    ),
    "host": (
        ("host_hits", "Segments that were read from the memory of the host.", "hits"),
        ("host_hit_tokens", "Their tokens.", "hit_tokens"),
        ("host_writes", "Segments that were copied there.", "writes"),
        ("host_refused_writes", "Segments that found no room there.", "refused"),
        ("host_evictions", "Segments that were removed to make room.", "evictions"),
    ),
    "disk": (
        ("store_hits", "Segments that were read from disk.", "hits"),
        ("store_hit_tokens", "Their tokens.", "hit_tokens"),
        ("store_writes", "Segments that were written.", "writes"),
        ("store_refused_writes", "Segments that could not be written, or for which there was no room.", "refused"),
        ("store_evictions", "Segments that were removed to make room.", "evictions"),
        ("store_evicted_age_seconds", "For how long they had not been read, summed.", "evicted_age_s"),
    ),
    "shared": (
        ("shared_store_hits", "Segments that were read from the shared store.", "hits"),
        ("shared_store_hit_tokens", "Their tokens.", "hit_tokens"),
        ("shared_store_writes", "Segments that were written there.", "writes"),
        ("shared_store_refused_writes", "Segments that could not be written there.", "refused"),
        ("shared_store_failures", "How often it could not be asked any more.", "failures"),
    ),
}


class EngineCollector(Collector):
    """Reads the statistics of the engine and the schema registry at every scrape."""

    def __init__(self, engine: AsyncLLM, schemas: Sized, model: str) -> None:
        self._engine = engine
        self._schemas = schemas
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        shadow = stats.shadow or ShadowStats()
        tiers = {"host": stats.host or TierStats(), "disk": stats.disk or TierStats()}
        tiers["shared"] = stats.shared or TierStats(up=False)
        sources: dict[str, Any] = {"engine": stats, "shadow": shadow, **tiers}
        yield from self._divergence(shadow)
        yield from self._speculation(stats)
        yield self._store_misses("host_misses", "memory of the host", tiers["host"])
        yield self._store_misses("store_misses", "store on disk", tiers["disk"])
        yield self._store_misses("shared_store_misses", "shared store", tiers["shared"])
        yield self._family(GaugeMetricFamily, "schemas", "Schemas that the server knows.", len(self._schemas))
        usage = stats.held_chunks / stats.chunks
        says = "Share of the KV pool that running requests need, 0 to 1."
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", says, usage)
        for kind, tables in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for source, rows in tables.items():
                for name, says, field in rows:
                    yield self._family(kind, name, says, getattr(sources[source], field))

    def _family(self, kind: type[Any], name: str, says: str, value: float) -> Metric:
        made = kind(PREFIX + name, says, labels=("model_name", "engine"))
        made.add_metric((self._model, ENGINE), value)
        family: Metric = made
        return family

    def _divergence(self, shadow: ShadowStats) -> Iterator[Metric]:
        """Yield the results of shadow sampling, by schema and policy."""
        of_all = ("model_name", "engine")
        dropped = CounterMetricFamily(
            PREFIX + "shadow_dropped", "Answers that were chosen and not compared.", labels=(*of_all, "reason")
        )
        counts = dict(shadow.dropped)
        for reason in DROP_REASONS:
            dropped.add_metric((self._model, ENGINE, reason), counts.get(reason, 0))
        yield dropped
        labels = (*of_all, "schema", "policy")
        nats = HistogramMetricFamily(PREFIX + "drift_nats", "Nats a token from full prefill, by answer.", labels=labels)
        steps = CounterMetricFamily(PREFIX + "drift_steps", "Steps of answers that were compared.", labels=labels)
        agreeing = CounterMetricFamily(
            PREFIX + "drift_agreeing_steps", "Those at which the likeliest token is the same.", labels=labels
        )
        fallbacks = GaugeMetricFamily(
            PREFIX + "drift_fallbacks", "Salts whose requests get a safer policy now.", labels=labels
        )
        for each in shadow.totals:
            of = (self._model, ENGINE, each.schema or _IN_PARTS, each.reuse)
            bounds = zip((*map(str, DIVERGENCE_BOUNDS), "+Inf"), (*each.at_most, each.samples), strict=True)
            nats.add_metric(of, list(bounds), each.kl)
            steps.add_metric(of, each.steps)
            agreeing.add_metric(of, each.agreeing)
            fallbacks.add_metric(of, each.fallbacks)
        yield from (nats, steps, agreeing, fallbacks)

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the draft tokens by the text they were found in."""
        for name, says, counts in (
            ("draft_tokens", "Draft tokens that were computed.", stats.drafted_tokens),
            ("draft_tokens_accepted", "Draft tokens that were accepted.", stats.accepted_tokens),
        ):
            family = CounterMetricFamily(PREFIX + name, says, labels=("model_name", "engine", "source"))
            found = dict(counts)
            for source in DRAFT_SOURCES:
                family.add_metric((self._model, ENGINE, source), found.get(source, 0))
            yield family

    def _store_misses(self, name: str, store: str, tier: TierStats) -> Metric:
        says = f"Segments that were expected in the {store} and not found."
        family = CounterMetricFamily(PREFIX + name, says, labels=("model_name", "engine", "reason"))
        counts = dict(tier.misses)
        for reason in STORE_MISSES:
            family.add_metric((self._model, ENGINE, reason), counts.get(reason, 0))
        return family
