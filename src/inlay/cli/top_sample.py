"""Samples of a server for ``inlay top``, and the rates between two samples."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from inlay.cli.cache_url import RunningCache
from inlay.errors import ParameterError

TIERS = ("pool", "host", "disk", "shared")

#: A tier below the pool → the prefix of its metrics.
_STORES = {"host": "host", "disk": "store", "shared": "shared_store"}
_PREFIX = "inlay:"
_ROWS = 100  # running requests that a sample asks for

Values = Mapping[str, Mapping[str, float]]  # metric → value of its own label, or "" → value


@dataclass(frozen=True, slots=True)
class ServerSample:
    """A server at one time.

    Args:
        at: on the clock of ``time.monotonic``.
        values: its metrics, without the prefix ``inlay:``. A metric with one label beside model and engine has a value
            for each of its values. Other labels are summed.
        cache: the answer of ``/v1/cache``.
        requests: the running requests, oldest first.
    """

    at: float
    values: Values
    cache: Mapping[str, Any]
    requests: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, server: RunningCache) -> ServerSample:
        """Ask a server. Raises ParameterError."""
        values = read_metrics(server.text("/metrics"))
        rows = server.get(f"/v1/requests?limit={_ROWS}")["data"]
        running = [row for row in rows if row["state"] != "ended"]
        return cls(time.monotonic(), values, server.stats(), running)

    def value(self, name: str) -> float:
        """The sum of a metric over its labels; 0 if the server has no such metric."""
        return sum(self.values.get(name, {}).values())


def read_metrics(text: str) -> Values:
    """Return the metrics of inlay in Prometheus' text format. Buckets are left out. Raises ParameterError."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith(_PREFIX) or sample.name.endswith("_bucket"):
                    continue
                own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
                found[sample.name.removeprefix(_PREFIX)][own[0] if len(own) == 1 else ""] += sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ParameterError(
            f"/metrics is not in Prometheus' text format ({error}); see that --url is an inlay server"
        ) from None
    return found


@dataclass(frozen=True, slots=True)
class Rates:
    """The changes between two samples. A server that restarted in between counts from 0.

    Args:
        before: the earlier sample; None for the start of the server, with no rates.
        now: the later one.
    """

    before: ServerSample | None
    now: ServerSample

    @property
    def seconds(self) -> float:
        return 0.0 if self.before is None else self.now.at - self.before.at

    def change(self, name: str, label: str | None = None) -> float:
        """The growth of a counter, over all labels or for one of them."""
        if self.before is None:
            return 0.0

        def total(sample: ServerSample) -> float:
            return sample.value(name) if label is None else sample.values.get(name, {}).get(label, 0.0)

        now, before = total(self.now), total(self.before)
        return now - before if now >= before else now

    def per_second(self, name: str) -> float | None:
        """The growth of a counter by second; None without an earlier sample."""
        return self.change(name) / self.seconds if self.seconds > 0 else None

    def mean(self, histogram: str) -> float | None:
        """The mean of the values that a histogram got in between; None without any."""
        count = self.change(f"{histogram}_count")
        return self.change(f"{histogram}_sum") / count if count else None

    def cached_share(self) -> float | None:
        """The share of prompt tokens from the cache, 0 to 1; None without prompts."""
        prompts = self.change("prompt_tokens_total")
        return self.change("prompt_tokens_cached_total") / prompts if prompts else None

    def misses(self) -> list[tuple[str, int, int]]:
        """Missed module tokens by reason: the reason, the tokens in between, and all tokens. The largest come first."""
        total = self.now.values.get("module_tokens_missed_total", {})
        rows = [
            (reason, round(self.change("module_tokens_missed_total", reason)), round(total[reason])) for reason in total
        ]
        return sorted((row for row in rows if row[2]), key=lambda row: (-row[1], -row[2], row[0]))


@dataclass(frozen=True, slots=True)
class TierUse:
    """The use of one tier.

    Args:
        segments, tokens, bytes: stored now.
        full: its fill from 0 to 1; None without a bound.
        hits: prompt tokens that the pool had, or segments read from a lower tier, since the start.
        misses: failed reads of a lower tier; None for the pool.
    """

    name: str
    segments: int
    tokens: int
    bytes: int
    full: float | None
    hits: int | None
    misses: int | None


def tier_uses(sample: ServerSample) -> list[TierUse]:
    """Return the tiers that a server has, nearest first."""
    found = []
    for name in TIERS:
        tier = sample.cache.get(name)
        if tier is None:
            continue
        if name == "pool":
            full = tier["used_chunks"] / tier["chunks"] if tier["chunks"] else None
            hits, misses = sample.value("prefix_cache_hits_total"), None
        else:
            full = tier["bytes"] / tier["quota"] if tier["quota"] else None
            hits = sample.value(f"{_STORES[name]}_hits_total")
            misses = round(sample.value(f"{_STORES[name]}_misses_total"))
        found.append(TierUse(name, tier["segments"], tier["tokens"], tier["bytes"], full, round(hits), misses))
    return found
