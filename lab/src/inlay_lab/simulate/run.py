"""One run of a simulated cluster: events in the order of time, and the results."""

from __future__ import annotations

import gc
import heapq
import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from inlay_lab.simulate.costs import Costs
from inlay_lab.simulate.replica import Job, Replica
from inlay_lab.simulate.routers import ModuleAffinity, Timed, make_router
from inlay_lab.simulate.traces import SimulatedRequest

_PUBLISHED_S = 1.0  # interval at which replicas report store changes
_WARM = 0.25  # share of requests at the start that do not count, since stores begin empty


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a run, without the requests that warmed it up.

    Attributes:
        hit_share: Share of prompt tokens found in pools.
        below_share: Share of prompt tokens read from tiers below.
        ttft_mean_s, ttft_p50_s, ttft_p99_s: Seconds to the first token.
        imbalance: The busiest replica's work over the mean.
        utilization: Share of the time that replicas computed.
        predicted_share: The router's prediction of hit_share.
        moves: Share of requests that went to a replica with fewer of their tokens.
        second_homes: Share of requests whose pieces got another home.
        least_p99_s: The 99th percentile of prefill time if each request ran at once where most of it is stored.
        decision_us: Median microseconds of a decision; decision_us_p99 is the 99th percentile.
        router_bytes: Memory of the router's map.
    """

    router: str
    requests: int
    hit_share: float
    below_share: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    imbalance: float
    utilization: float
    predicted_share: float | None
    moves: float | None
    second_homes: float | None
    least_p99_s: float | None
    decision_us: float
    decision_us_p99: float
    router_bytes: int | None
    router_keys: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate(
    requests: Sequence[SimulatedRequest],
    *,
    router: str,
    replicas: int,
    costs: Costs,
    seed: int = 0,
    measure_memory: bool = False,
) -> SimulationResult:
    """Run a cluster over requests in the order of time.

    Args:
        measure_memory: Measure the router's memory, which takes several times as long.
    """
    if measure_memory:
        tracemalloc.start()
    try:
        return _Run(requests, router, replicas, costs, seed).result()
    finally:
        if measure_memory:
            tracemalloc.stop()


class _Run:
    def __init__(
        self, requests: Sequence[SimulatedRequest], router: str, replicas: int, costs: Costs, seed: int
    ) -> None:
        self._name = router
        self._costs = costs
        self._requests = requests
        self._replicas = [
            Replica(f"replica-{number}", costs, self._first_token, self._end) for number in range(replicas)
        ]
        self._router = make_router(router, self._replicas, costs, seed)
        self._timed = Timed(self._router)
        self._jobs: list[Job] = []
        self._first = int(len(requests) * _WARM)
        self._busy: dict[str, float] = {}  # seconds between the first counted request and the last one

    def result(self) -> SimulationResult:
        began, ended = self._run()
        jobs = self._jobs[self._first :]
        tokens = sum(job.request.wanted.tokens for job in jobs)
        ttft = np.array([job.ttft_s for job in jobs])
        busy = np.array(list(self._busy.values()))
        own = self._router if isinstance(self._router, ModuleAffinity) else None
        return SimulationResult(
            router=self._name,
            requests=len(jobs),
            hit_share=sum(job.found for job in jobs) / tokens,
            below_share=sum(job.read for job in jobs) / tokens,
            ttft_mean_s=float(ttft.mean()),
            ttft_p50_s=float(np.percentile(ttft, 50)),
            ttft_p99_s=float(np.percentile(ttft, 99)),
            imbalance=float(busy.max() / busy.mean()) if busy.any() else 1.0,
            utilization=float(busy.mean() / max(ended - began, 1e-9)),
            predicted_share=None if own is None else sum(job.decision.overlap for job in jobs) / tokens,
            moves=None if own is None else _share(job.decision.moved for job in jobs),
            second_homes=None if own is None else _share(job.decision.second_home for job in jobs),
            least_p99_s=None if own is None else float(np.percentile([_least_s(job, self._costs) for job in jobs], 99)),
            decision_us=float(np.percentile(self._timed.micros, 50)),
            decision_us_p99=float(np.percentile(self._timed.micros, 99)),
            router_bytes=_memory() if own is not None and tracemalloc.is_tracing() else None,
            router_keys=None if own is None else len(own.residency),
        )

    def _run(self) -> tuple[float, float]:
        """Run all events; returns the start of the counted requests and the arrival of the last one."""
        events: list[tuple[float, int, int]] = []  # time, replica, and version of its state
        states = [0] * len(self._replicas)
        places = {replica.name: at for at, replica in enumerate(self._replicas)}
        published = began = 0.0
        for number, request in enumerate(self._requests):
            now = request.at
            while events and events[0][0] <= now:
                at, place, state = heapq.heappop(events)
                if state == states[place]:
                    self._replicas[place].advance(at)
                    self._push(events, states, place)
            while self._router.tells and published + _PUBLISHED_S <= now:
                published += max(_PUBLISHED_S, (now - published) // _PUBLISHED_S * _PUBLISHED_S)
                for replica in self._replicas:
                    self._router.apply(replica.name, replica.changes())
            if number == self._first:
                began = now
                for replica in self._replicas:
                    replica.advance(now)
                    self._busy[replica.name] = replica.busy_s
            decision = self._timed.choose(request.wanted, now)
            job = Job(request, decision)
            self._jobs.append(job)
            place = places[decision.replica]
            self._replicas[place].add(job, now)
            self._push(events, states, place)
        ended = self._requests[-1].at
        for replica in self._replicas:
            replica.advance(ended)
            self._busy[replica.name] = replica.busy_s - self._busy.get(replica.name, 0.0)
            self._push(events, states, places[replica.name])
        while events:
            at, place, state = heapq.heappop(events)
            if state == states[place]:
                self._replicas[place].advance(at)
                self._push(events, states, place)
        return began, ended

    def _push(self, events: list[tuple[float, int, int]], states: list[int], place: int) -> None:
        states[place] += 1
        until = self._replicas[place].next_event()
        if until < math.inf:
            heapq.heappush(events, (until, place, states[place]))

    def _first_token(self, job: Job) -> None:
        self._router.first_token(job)

    def _end(self, job: Job) -> None:
        self._router.end(job)


def _least_s(job: Job, costs: Costs) -> float:
    """Seconds of a request's prefill alone, at the replica with most of it."""
    tokens = max(1, job.request.wanted.tokens - job.decision.best)
    return math.ceil(tokens / costs.chunk) * costs.pass_s + tokens * costs.prefill_s


def _share(said: Any) -> float:
    answers: list[bool] = list(said)
    return sum(answers) / len(answers)


def _memory() -> int:
    """Bytes of the router's map, by the files that allocated them."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    mine = snapshot.filter_traces([tracemalloc.Filter(True, "*affinity.py"), tracemalloc.Filter(True, "*loads.py")])
    return sum(trace.size for trace in mine.traces)
