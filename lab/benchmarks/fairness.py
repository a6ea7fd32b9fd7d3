"""Passes from arrival to the first token, of short requests beside long ones: only the scheduler, in simulated time.

Run ``python lab/benchmarks/fairness.py``. Every pass takes one unit of time and at most 64 tokens. Nothing is computed,
so the figures hold for any model and machine. Each workload has watched requests and others beside them. Prints a
table, and the same as one line of JSON.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from inlay.engine.scheduler import Admission, Scheduler

BUDGET = 64
SHORT, LONG, ANSWER = 28, 1920, 8


@dataclass(eq=False)
class Job:
    """A simulated request.

    Attributes:
        due: The pass before which it arrives.
        watched: It counts in the results.
    """

    due: int
    prompt: int
    watched: bool = True
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    sequences: int = 1
    deadline: float | None = None
    prompt_left: int = 0
    said: int = 0
    first: int | None = None

    @property
    def arrival(self) -> float:
        return float(self.due)

    @property
    def solo(self) -> int:
        """Passes to the first token without other requests."""
        return math.ceil(self.prompt / BUDGET)


class Boundless:
    """A pool that always has room."""

    def admit(self, job: Job, alone: bool) -> Admission:
        job.prompt_left = job.prompt + job.said
        return Admission.ADMITTED

    def grow(self, job: Job) -> bool:
        return True

    def release(self, job: Job) -> None:
        job.prompt_left = 0


def simulate(jobs: list[Job], max_requests: int = 64) -> list[int]:
    """Passes to the first token of watched requests, beyond those without other requests."""
    scheduler: Scheduler[Job] = Scheduler(max_requests, BUDGET, BUDGET, None, Boundless())
    coming = sorted(jobs, key=lambda job: job.due)
    now = 0
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0].due <= now:
            scheduler.add(coming.pop(0))
        step = scheduler.step(now)
        now += 1
        for job, tokens in step.prefill:
            job.prompt_left -= tokens
        for job in [*step.decode, *(job for job, _ in step.prefill if not job.prompt_left)]:
            job.said += 1
            job.first = job.first or now
            if job.said == ANSWER:
                scheduler.remove(job)
    return sorted(job.first - job.due - job.solo for job in jobs if job.watched and job.first is not None)


def arrivals(seed: int, passes: int, gap: float) -> Iterator[int]:
    """Random times, ``gap`` passes apart on average."""
    randomly, at = random.Random(seed), 0.0
    while (at := at + randomly.expovariate(1 / gap)) < passes:
        yield int(at)


def workloads() -> dict[str, tuple[list[Job], int]]:
    """Name → jobs, and the number of slots."""
    shorts = [Job(at, SHORT) for at in arrivals(1, 2000, 4)]
    return {
        "one long prompt of 1,920 tokens": ([Job(0, LONG, False), *(Job(n, SHORT) for n in range(1, 31, 3))], 64),
        "a long prompt every 60 passes": ([*shorts, *(Job(at, LONG, False) for at in arrivals(2, 2000, 60))], 64),
        "twenty long prompts at once": (
            [Job(0, LONG, False) for _ in range(20)] + [Job(n, SHORT) for n in range(1, 400, 4)],
            64,
        ),
        "another tenant's 200 prompts, 16 places": (
            [Job(0, 400, False, "other") for _ in range(200)] + [Job(n, SHORT, True, "mine") for n in range(5, 400, 4)],
            16,
        ),
    }


def main() -> None:
    """Print the results of each workload."""
    rows = []
    print(f"{'short requests of 28 tokens beside':42} {'p50':>5} {'p99':>5}   passes beyond those alone")
    for name, (jobs, places) in workloads().items():
        late = simulate(jobs, places)
        p50, p99 = late[len(late) // 2], late[min(len(late) - 1, int(len(late) * 0.99))]
        rows.append({"workload": name, "requests": len(late), "p50": p50, "p99": p99})
        print(f"{name:42} {p50:5} {p99:5}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
