"""Fairness: how tenants share the tokens of passes, and how the jobs of one tenant share its part.

Tenants share by weight, as in "Fairness in Serving Large Language Models" (arXiv 2401.00588). Each tenant has a counter
of its computed tokens divided by its weight. The tenant with the lowest counter is served next. A returning tenant
starts at the lowest counter of the others, so absence earns no credit.

Within a tenant, the first job of the queue gets at least a quarter. Other jobs of its priority share three quarters,
shortest remaining prompt first. So a short prompt has its first token after a pass or two, and every prompt advances.
Jobs of lower priority share a quarter.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set
from typing import Protocol, TypeVar

#: The smallest portion of a pass that a tenant gets at a time, in tokens.
_LEAST = 16


class Sharer(Protocol):
    """The fields of a job that fairness needs. See jobs.Job."""

    priority: int
    tenant: str
    weight: float

    @property
    def prompt_left(self) -> int: ...


S = TypeVar("S", bound=Sharer)


class Shares:
    """Computed tokens per tenant, divided by weight."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def join(self, tenant: str, active: Set[str]) -> None:
        """Called when a tenant without jobs gets one. ``active`` are the tenants with jobs."""
        lowest = min((self._served.get(other, 0.0) for other in active), default=None)
        if lowest is None:
            self._served.clear()  # no tenant is owed anything
        else:  # absent tenants below the lowest counter would start level anyway, so they are dropped
            self._served = {name: served for name, served in self._served.items() if served > lowest or name in active}
            self._served[tenant] = max(lowest, self._served.get(tenant, 0.0))

    def of(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def charge(self, job: Sharer, tokens: int) -> None:
        self._served[job.tenant] = self.of(job.tenant) + tokens / job.weight

    def split(self, jobs: Sequence[S], budget: int) -> dict[S, int]:
        """The number of tokens of a pass for each prompt. ``jobs`` are in queue order."""
        if sum(job.prompt_left for job in jobs) <= budget:
            given = {job: job.prompt_left for job in jobs}
            for job, tokens in given.items():
                self.charge(job, tokens)
            return given
        tenants: dict[str, list[S]] = {}
        for job in jobs:
            tenants.setdefault(job.tenant, []).append(job)
        return self._take_turns(tenants, budget)

    def _take_turns(self, tenants: dict[str, list[S]], budget: int) -> dict[S, int]:
        portion = max(_LEAST, budget // len(tenants))
        given: dict[S, int] = {}
        line = [(self.of(tenant), tenant) for tenant in tenants]
        heapq.heapify(line)
        while budget and line:
            tenant = heapq.heappop(line)[1]
            taken = _within(tenants[tenant], min(portion, budget), given)
            for job, tokens in taken.items():
                given[job] = given.get(job, 0) + tokens
                budget -= tokens
                self.charge(job, tokens)
            if taken:
                heapq.heappush(line, (self.of(tenant), tenant))
        return given


def _within(jobs: Sequence[S], tokens: int, given: dict[S, int]) -> dict[S, int]:
    """Split a tenant's part of a pass among its prompts. ``given`` are their earlier parts of the same pass."""
    left = {job: job.prompt_left - given.get(job, 0) for job in jobs}
    waiting = [job for job in jobs if left[job]]
    newcomers = sorted(waiting[1:], key=lambda job: (job.priority, left[job]))
    peers = [job for job in newcomers if job.priority == waiting[0].priority]
    most, room = tokens * 3 // 4, tokens
    taken: dict[S, int] = {}
    for line, part in ((peers, most), (newcomers[len(peers) :], tokens // 4), (waiting, tokens)):
        part = min(part, room if line is waiting else room - (tokens - most))
        for job in line:
            more = min(part, left[job])
            if more > 0:
                taken[job] = taken.get(job, 0) + more
                left[job] -= more
                part -= more
                room -= more
    return taken


def crowded_out(counts: dict[str, tuple[int, float]], tenant: str, weight: float) -> str | None:
    """The tenant that must give up a slot to ``tenant`` when all slots are taken; None if ``tenant`` has its share.

    The slot comes from the tenant with the most slots for its weight. It moves only if that tenant still has at least
    as many for its weight afterwards.

    Args:
        counts: (slots, weight) of each tenant with slots.
    """
    have = counts.get(tenant, (0, weight))[0]
    name = max(counts, key=lambda name: counts[name][0] / counts[name][1], default=None)
    if name is None or name == tenant:
        return None
    count, others = counts[name]
    return name if (have + 1) / weight <= (count - 1) / others else None
