"""Prometheus metrics of a router. The most important ones compare predicted with found tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.cluster.affinity import Decision

_PREFIX = "inlay:router_"
_BUCKETS = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 2e-3, 10e-3)

#: Fields of RouterCounts and their help texts.
_COUNTERS = {
    "requests": "Requests that were sent to a replica.",
    "predicted_tokens": "Prompt tokens that were thought to be found where the request was sent.",
    "found_tokens": "Prompt tokens that were found there.",
    "prompt_tokens": "Prompt tokens of the requests that found_tokens is of.",
    "homeless_tokens": "Prompt tokens of modules and prefixes that no replica was thought to have.",
    "moves": "Requests that went elsewhere than where most of them was.",
    "second_homes": "Requests by which pieces got another home: all who held them had more than their share to do.",
    "retries": "Requests that were sent again, since their replica went or stalled before it had said anything.",
    "lost": "Replicas that went away with requests under way.",
    "resyncs": "Times that a replica's news had a gap and all that it holds was asked for.",
}
_GAUGES = {
    "replicas": "Replicas that may be chosen.",
    "stalled": "Replicas that are passed by: nothing is heard of them, or their engine comes no further.",
    "keys": "Keys of modules and prefixes that the router knows some replica to hold.",
    "dropped_keys": "Keys that were forgotten since there was no room for more.",
    "imbalance": "Work given of late to the replica that got most, beside the mean.",
}


class RouterCounts:
    """Counts of one router. Its lock protects them."""

    def __init__(self) -> None:
        self.requests = 0
        self.predicted_tokens = 0
        self.found_tokens = 0
        self.prompt_tokens = 0
        self.homeless_tokens = 0
        self.moves = 0
        self.second_homes = 0
        self.retries = 0
        self.lost = 0
        self.resyncs = 0
        self.registry = CollectorRegistry()
        says = "Time that the choice of a replica took, the wait for its lock included."
        self.decision_s = Histogram(f"{_PREFIX}decision_seconds", says, buckets=_BUCKETS, registry=self.registry)

    def routed(self, decision: Decision) -> None:
        self.requests += 1
        self.homeless_tokens += decision.homeless
        self.moves += decision.moved
        self.second_homes += decision.second_home

    def found(self, predicted: int, found: int, prompt: int) -> None:
        """Count a request with a computed prompt: predicted tokens, found tokens, all tokens."""
        self.predicted_tokens += predicted
        self.found_tokens += found
        self.prompt_tokens += prompt


class RouterCollector(Collector):
    """A router's counts as metrics. state: returns the gauges."""

    def __init__(self, counts: RouterCounts, state: Callable[[], Mapping[str, float]]) -> None:
        self._counts = counts
        self._state = state

    def collect(self) -> Iterator[Metric]:
        for name, says in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, says, value=getattr(self._counts, name))
        state = self._state()
        for name, says in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, says, value=state[name])
        yield from self._counts.registry.collect()
