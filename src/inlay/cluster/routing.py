"""The state of an ingress's replicas and running requests, and the choice of replicas.

Ray's router calls from its own thread and the client from the event loop. One lock protects everything. The most
important metrics compare predicted with found tokens.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inlay.cluster.affinity import Affinity, Decision, ResidencyMap, RouterSettings
from inlay.cluster.loads import RequestLoad
from inlay.cluster.pieces import Wanted, WantedPiece
from inlay.kv.changes import StoreChanges
from inlay.types import EngineStats, RequestMetrics, Usage

_PART = 4096  # keys that are applied under one lock, so that no thread waits long
_LEARNED = 0.05  # weight of the newest measurement
_TOKENS = 1000.0  # assumed tokens of a prompt before the first measurement


@dataclass(eq=False, slots=True)
class _RoutedRequest:
    """A running request. tried: replicas that it is not sent to again. replica: the one that it is at, if any."""

    wanted: Wanted
    tried: set[str] = field(default_factory=set)
    decision: Decision | None = None
    replica: str | None = None
    waits: bool = True  # for its first token


@dataclass(slots=True)
class _Heard:
    """The last status of a replica. at: time of the status. moved: time of its engine's last progress."""

    at: float
    moved: float
    stats: EngineStats | None = None


class Routing:
    """The replicas of one engine, as seen by one ingress. Thread-safe.

    Args:
        settings: The weights of the router.
        max_bytes: Memory for the residency map.
        contiguous: True if modules count like text, only up to the first gap. Used for comparisons.
        clock: Returns seconds.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        max_bytes: int = 2**30,
        contiguous: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = RouterCounts()
        self._settings = settings
        self._contiguous = contiguous
        self._clock = clock
        self._affinity = Affinity(ResidencyMap(max_bytes=max_bytes, clock=clock), settings)
        self._computed = _TOKENS  # moving averages of the computed tokens of prompts, and of the seconds for them
        self._computed_s = _TOKENS * settings.prefill_s
        self._asked: dict[str, _RoutedRequest] = {}
        self._pinned: dict[str, str] = {}
        self._heard: dict[str, _Heard] = {}
        self._lock = threading.Lock()

    # Replicas

    @property
    def replicas(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._heard)

    def set_replicas(self, names: Collection[str]) -> None:
        """Set the present replicas. Others are forgotten."""
        now = self._clock()
        with self._lock:
            for name in [name for name in self._heard if name not in names]:
                self._forget(name)
            for name in names:
                if name not in self._heard:
                    self._heard[name] = _Heard(now, now)
                    self._affinity.join(name)

    def lost(self, replica: str) -> None:
        """Forget a replica that has gone, and all that it held. ``set_replicas`` adds it again."""
        with self._lock:
            if replica in self._heard:
                self._forget(replica)
                self.counts.lost += 1

    def stalled(self, replica: str) -> bool:
        """Return True if a replica has sent nothing for long, or its engine has work and makes no progress."""
        with self._lock:
            return replica in self._passed_by()

    def heard(self, replica: str) -> tuple[int, int]:
        """Return the epoch and number to ask a replica for next; see ResidencyMap.heard."""
        with self._lock:
            return self._affinity.residency.heard(replica) if replica in self._heard else (0, 0)

    def update(self, replica: str, stats: EngineStats, changes: StoreChanges) -> None:
        """Apply the status of a replica."""
        now = self._clock()
        with self._lock:
            heard = self._heard.get(replica)
            if heard is None:
                return
            before = heard.stats
            idle = not stats.busy and not stats.waiting and not stats.running
            if idle or before is None or stats.steps != before.steps:
                heard.moved = now
            heard.at, heard.stats = now, stats
        for part in _parts(changes):
            with self._lock:
                if replica in self._heard and not self._affinity.residency.apply(replica, part):
                    self.counts.resyncs += 1
                    return

    def stats(self) -> list[EngineStats]:
        """Return the last statistics of each replica."""
        with self._lock:
            return [heard.stats for heard in self._heard.values() if heard.stats is not None]

    # Requests

    def ask(self, request_id: str, wanted: Wanted) -> None:
        """Register a request before it is sent."""
        if self._contiguous:
            pieces = [replace(piece, chained=at > 0) for at, piece in enumerate(wanted.pieces)]
            wanted = replace(wanted, pieces=tuple(pieces))
        with self._lock:
            self._asked[request_id] = _RoutedRequest(wanted)

    def pin(self, call_id: str, replica: str) -> None:
        """Bind a call to one replica."""
        with self._lock:
            self._pinned[call_id] = replica

    def unpin(self, call_id: str) -> None:
        with self._lock:
            self._pinned.pop(call_id, None)

    def pinned(self, call_id: str) -> str | None:
        with self._lock:
            return self._pinned.get(call_id)

    def choose(self, request_id: str, available: Collection[str]) -> str | None:
        """Return the replica for a request among the available ones, or None."""
        began = time.perf_counter()
        with self._lock:
            asked = self._asked.get(request_id)
            absent = {name for name in self._heard if name not in available}
            tried = set() if asked is None else asked.tried
            wanted = Wanted((), 1) if asked is None else asked.wanted
            now = self._clock()
            decision = None
            for without in (absent | tried | self._passed_by(), absent | tried, absent):
                decision = self._affinity.choose(wanted, now, without)
                if decision is not None:
                    break
            if decision is not None and asked is not None:
                asked.decision = decision
        self.counts.decision_s.observe(time.perf_counter() - began)
        return None if decision is None else decision.replica

    def routed(self, request_id: str, replica: str) -> None:
        """Record the replica that a request was sent to, which may differ from the choice."""
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is None:
                return
            decision = asked.decision
            if decision is None or decision.replica != replica:
                prefill_s = asked.wanted.tokens * self._affinity.prefill_s
                decision = Decision(replica, RequestLoad(prefill_s, prefill_s))
            self._leave(asked)
            asked.decision, asked.replica, asked.waits = decision, replica, True
            asked.tried.add(replica)
            self._affinity.loads.begin(replica, decision.work)
            self._affinity.residency.note(replica, asked.wanted.keys)
            self.counts.routed(decision)

    def replica_of(self, request_id: str) -> str | None:
        """Return the replica that a request is at."""
        with self._lock:
            asked = self._asked.get(request_id)
            return None if asked is None else asked.replica

    def waits_at(self, request_id: str) -> str | None:
        """Return the replica that a request is at or is about to be sent to."""
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is None or asked.replica is not None or asked.decision is None:
                return None if asked is None else asked.replica
            return asked.decision.replica

    def first_token(self, request_id: str) -> None:
        """Record the end of a request's prefill."""
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is not None and asked.waits:
                self._first(asked)

    def learn(self, request_id: str, usage: Usage, metrics: RequestMetrics | None) -> None:
        """Update the estimated times from an answered request.

        Args:
            request_id: of the request.
            usage: its counts of found and computed tokens.
            metrics: its times.
        """
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is None or asked.decision is None:
                return
            self.counts.found(asked.decision.overlap, usage.cached_tokens, usage.prompt_tokens)
            took = None if metrics is None else metrics.compute_s
            if took and usage.computed_tokens:
                self._computed_s += _LEARNED * (took - self._computed_s)
                self._computed += _LEARNED * (usage.computed_tokens - self._computed)
                self._affinity.prefill_s = self._computed_s / self._computed

    def ended(self, request_id: str, said: int = 0) -> None:
        """Remove a request that has ended. said: tokens of its answers."""
        with self._lock:
            asked = self._asked.pop(request_id, None)
            if asked is not None:
                self._leave(asked)
                if said:
                    self._affinity.answer += _LEARNED * (said - self._affinity.answer)

    def again(self, request_id: str) -> None:
        """Record that a request failed at its replica and is to be sent to another one."""
        with self._lock:
            asked = self._asked.get(request_id)
            if asked is not None:
                self._leave(asked)
                if asked.decision is not None:
                    asked.tried.add(asked.decision.replica)
                self.counts.retries += 1

    def homes(self, pieces: Sequence[WantedPiece]) -> list[str]:
        """Return for each piece the replica that is to store it; see ``Affinity.homes``. Empty without replicas."""
        with self._lock:
            return self._affinity.homes(pieces, self._passed_by()) or self._affinity.homes(pieces)

    def resident(self, pieces: Sequence[WantedPiece]) -> list[str | None]:
        """Return for each piece "pool" or "below" if a replica holds it there, else None."""
        with self._lock:
            residency = self._affinity.residency
            pools = residency.masks([piece.keys[-1] for piece in pieces])
            below = residency.masks_below([piece.below[-1] for piece in pieces])
        return ["pool" if pool else "below" if lower else None for pool, lower in zip(pools, below, strict=True)]

    def snapshot(self) -> dict[str, float]:
        """Return the gauges of the router for metrics."""
        with self._lock:
            given = self._affinity.loads.given_s
            mean = float(given.mean()) if len(given) else 0.0
            return {
                "replicas": len(self._heard),
                "keys": len(self._affinity.residency),
                "dropped_keys": self._affinity.residency.dropped,
                "imbalance": float(given.max()) / mean if mean > 0 else 1.0,
                "stalled": len(self._passed_by()),
            }

    # Called with the lock held

    def _passed_by(self) -> set[str]:
        oldest = self._clock() - self._settings.stalled_s
        return {name for name, heard in self._heard.items() if min(heard.at, heard.moved) < oldest}

    def _forget(self, replica: str) -> None:
        del self._heard[replica]
        self._affinity.forget(replica)

    def _first(self, asked: _RoutedRequest) -> None:
        asked.waits = False
        if asked.replica is not None and asked.decision is not None:
            self._affinity.loads.first_token(asked.replica, asked.decision.work)

    def _leave(self, asked: _RoutedRequest) -> None:
        if asked.replica is not None:
            if asked.waits:
                self._first(asked)
            self._affinity.loads.end(asked.replica)
            asked.replica = None


def _parts(changes: StoreChanges) -> Sequence[StoreChanges]:
    """Split changes into parts that are applied one after another. Only the last one has the new number."""
    added, none = changes.added, array("Q")
    if len(added) + len(changes.removed) <= _PART:
        return (changes,)
    rows = [(added[at : at + _PART], none) for at in range(0, len(added), _PART)]
    rows += [(none, changes.removed[at : at + _PART]) for at in range(0, len(changes.removed), _PART)]
    last = len(rows) - 1
    return [
        StoreChanges(
            changes.epoch,
            changes.first,
            changes.last if at == last else changes.first,
            some,
            gone,
            changes.below if at == last else None,
            changes.whole and at == 0,
        )
        for at, (some, gone) in enumerate(rows)
    ]


_PREFIX = "inlay:router_"
_BUCKETS = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 2e-3, 10e-3)

#: Fields of RouterCounts and their help texts.
_COUNTERS = {
    "requests": "Requests that were sent to a replica.",
    "predicted_tokens": "Prompt tokens that the router expected at the chosen replica.",
    "found_tokens": "Prompt tokens that the chosen replica found.",
    "prompt_tokens": "Prompt tokens of the requests that found_tokens counts.",
    "homeless_tokens": "Prompt tokens of modules and prefixes that the router expected at no replica.",
    "moves": "Requests that were not sent to the replica with most of their tokens.",
    "second_homes": "Requests that gave pieces another home, because every replica with these pieces was overloaded.",
    "retries": "Requests that were sent again, because their replica was lost or stalled before its first event.",
    "lost": "Replicas that were lost while they had requests.",
    "resyncs": "Times that a replica's changes had a gap, so that all its keys were fetched.",
}
_GAUGES = {
    "replicas": "Replicas that may be chosen.",
    "stalled": "Replicas that get no requests: they do not report, or their engine makes no progress.",
    "keys": "Keys of modules and prefixes that the router expects at a replica.",
    "dropped_keys": "Keys that were dropped because the table was full.",
    "imbalance": "Recent work of the busiest replica, divided by the mean.",
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
        says = "Seconds that the choice of a replica took, with the wait for the lock."
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
