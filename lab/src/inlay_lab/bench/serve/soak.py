"""A soak test: an hour of varied traffic, and whether the server's memory stays at its settled size."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from inlay.errors import ParameterError
from inlay_lab.bench.serve.measure import at_rest
from inlay_lab.bench.serve.traffic import Seen, Tenant
from inlay_lab.bench.serve.under_attack import memory_of

FLAT = 0.02  # allowed growth over the settled size

_LOOKS = 60  # samples of the server's memory in an interval; their median counts
_CLIENTS = 2  # of each tenant
_GUEST_EPISODES = 5
_TAKEN_UP_S = 1.5  # time until a running server has read a changed key file


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Options of a soak test. Raises ParameterError if it is too short.

    Attributes:
        minutes: Duration.
        settle: Minutes after which memory should have settled.
        interval_s: Seconds between two lines.
        rate: Most requests a second, of all clients together.
        tenants: Names; the first one is an admin. One guest tenant comes and goes in each interval.
    """

    minutes: float = 60.0
    settle: float = 10.0
    interval_s: float = 60.0
    rate: float = 4.0
    tenants: tuple[str, ...] = ("admin", "acme", "globex")
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.settle * 60, (self.minutes - self.settle) * 60 - self.interval_s) < self.interval_s:
            least = f"{self.settle + self.interval_s / 30:g}"
            raise ParameterError(
                f"a soak of {self.minutes:g} minutes says nothing where memory settles in {self.settle:g}; "
                f"both take an interval of {self.interval_s:g} s at least: give it {least} minutes"
            )


class Pace:
    """Starts requests at random intervals, at most at a given rate."""

    def __init__(self, rate: float, draw: random.Random) -> None:
        self._rate, self._draw, self._next = rate, draw, time.perf_counter()

    async def __call__(self) -> None:
        self._next = max(self._next, time.perf_counter()) + self._draw.expovariate(self._rate)
        await asyncio.sleep(self._next - time.perf_counter())


async def run_soak(
    url: str, pid: int, keys: Callable[[], AbstractContextManager[Any]], soak: Soak, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the soak test; returns the JSON report, with sizes in MiB, one an interval.

    Args:
        url: Of the server, without a path.
        pid: Of the server's process, on this machine.
        keys: Opens the server's KeyFile for changes; see ``server.keys.editing``.
        say: Called with each line of progress.
    """
    draw, seen = random.Random(soak.seed), Seen()
    pace, over = Pace(soak.rate, draw), asyncio.Event()

    def client(key: str, *, admin: bool = False) -> Tenant:
        return Tenant(url, key, random.Random(draw.random()), seen, pace, admin=admin)

    async def ask_on(tenant: Tenant) -> None:
        while not over.is_set():
            await tenant.episode()
        tenant.leave()

    async def guests() -> None:
        """Guests: each gets a key, sends a few episodes, and loses the key again."""
        for number in takewhile(lambda _: not over.is_set(), count()):
            began = time.perf_counter()
            with keys() as file:
                key, key_id = file.add(f"guest-{number}")
            await asyncio.sleep(_TAKEN_UP_S)
            guest = client(key)
            for _ in range(_GUEST_EPISODES):
                await guest.episode()
            guest.leave()
            with keys() as file:
                del file.keys[key_id], file.tenants[f"guest-{number}"]
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(0.0, began + soak.interval_s - time.perf_counter()))

    with keys() as file:
        named = {name: file.add(name, admin=name == soak.tenants[0])[0] for name in soak.tenants}
    await asyncio.sleep(_TAKEN_UP_S)
    (admin, *_) = named.values()
    clients = [client(key, admin=key == admin) for key in named.values() for _ in range(_CLIENTS)]
    tasks = [asyncio.create_task(ask_on(each)) for each in clients] + [asyncio.create_task(guests())]
    sizes: list[tuple[float, float]] = []
    for number in range(round(soak.minutes * 60 / soak.interval_s)):
        rss, own = await _resident(pid, soak.interval_s)
        sizes.append((rss, own))
        at = (number + 1) * soak.interval_s / 60
        say(f"minute {at:.3g}: {rss:.1f} MiB, {own:.1f} of them its own; {seen.requests:,} requests")
    over.set()
    await asyncio.gather(*tasks)
    left = await at_rest(url, admin)
    for name in ("inlay:kv_chunks_held{}", "inlay:schemas{}"):  # nothing runs, and all schemas were deleted
        if left[name]:
            seen.wrong(f"{name} is {left[name]:g} at the end")
    return {**judged(sizes, soak), **_told(seen)}


async def _resident(pid: int, seconds: float) -> tuple[float, float]:
    """As ``memory_of``, in MiB. The median over the interval hides short peaks of single requests."""
    looks = []
    for _ in range(_LOOKS):
        await asyncio.sleep(seconds / _LOOKS)
        looks.append(memory_of(pid))
    rss, own = (round(statistics.median(sizes) / 2**20, 1) for sizes in zip(*looks, strict=True))
    return rss, own


def judged(sizes: list[tuple[float, float]], soak: Soak) -> dict[str, Any]:
    """Report whether the server's own memory stayed flat after the interval in which it should have settled.

    Args:
        sizes: Resident memory and the server's own part of it, in MiB, by interval.
        soak: The options of the run.
    """
    at = round(soak.settle * 60 / soak.interval_s) - 1
    rss, own = ([size[which] for size in sizes] for which in range(2))
    growth, rss_growth = (round(max(each[at + 1 :]) / each[at] - 1, 4) for each in (own, rss))
    return {
        "rss_mib": rss,
        "own_mib": own,
        "rss_growth": rss_growth,
        "growth": growth,
        "flat": growth <= FLAT,
    }


def _told(seen: Seen) -> dict[str, Any]:
    return {
        "requests": seen.requests,
        "kinds": dict(seen.kinds),
        "statuses": {str(status): times for status, times in sorted(seen.statuses.items())},
        "problems": seen.problems,
    }
