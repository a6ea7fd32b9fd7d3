"""The load of each replica of a cluster, as counted by a router, and the wanted number of replicas."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """The work of a request for a replica. prefill_s: seconds until its first token. total_s: seconds in total."""

    prefill_s: float
    total_s: float


class Loads:
    """The loads of replicas by name. A replica's index in the arrays may change when another one leaves.

    Args:
        memory_s: Time constant in seconds of ``given_s``.

    Attributes:
        queue_s: Seconds of prefill that were assigned and are not done.
        given_s: Seconds of work that were assigned recently, fading.
        running: Running requests.
        salts: A hash of each replica's name, for rendezvous hashing.
    """

    def __init__(self, memory_s: float) -> None:
        self.names: list[str] = []
        self.queue_s: Floats = np.zeros(0)
        self.given_s: Floats = np.zeros(0)
        self.running: Floats = np.zeros(0)
        self.salts: Words = np.zeros(0, np.uint64)
        self._memory_s = memory_s
        self._places: dict[str, int] = {}
        self._since = 0.0

    def __len__(self) -> int:
        return len(self.names)

    def place(self, replica: str) -> int | None:
        """Return a replica's index in the arrays, or None for an unknown replica."""
        return self._places.get(replica)

    def join(self, replica: str) -> None:
        """Add a replica. It starts with the mean of the recent work, so that it does not get all requests at once."""
        if replica in self._places:
            return
        mean = float(self.given_s.mean()) if self.names else 0.0
        self._places[replica] = len(self.names)
        self.names.append(replica)
        self.queue_s = np.append(self.queue_s, 0.0)
        self.given_s = np.append(self.given_s, mean)
        self.running = np.append(self.running, 0.0)
        self.salts = np.append(self.salts, _salt(replica))

    def leave(self, replica: str) -> None:
        place = self._places.pop(replica, None)
        if place is None:
            return
        del self.names[place]
        self._places = {name: at for at, name in enumerate(self.names)}
        self.queue_s, self.given_s = np.delete(self.queue_s, place), np.delete(self.given_s, place)
        self.running, self.salts = np.delete(self.running, place), np.delete(self.salts, place)

    def fade(self, now: float) -> None:
        if now > self._since:
            self.given_s *= math.exp((self._since - now) / self._memory_s)
            self._since = now

    def begin(self, replica: str, work: RequestLoad) -> None:
        """Add a request's work to a replica."""
        place = self._places.get(replica)
        if place is not None:
            self.queue_s[place] += work.prefill_s
            self.given_s[place] += work.total_s
            self.running[place] += 1

    def first_token(self, replica: str, work: RequestLoad) -> None:
        """Remove the prefill of a request from the queue, when it is over or the request has ended before."""
        place = self._places.get(replica)
        if place is not None:
            self.queue_s[place] = max(0.0, self.queue_s[place] - work.prefill_s)

    def end(self, replica: str) -> None:
        """Remove a request that has ended. Call ``first_token`` before."""
        place = self._places.get(replica)
        if place is not None:
            self.running[place] = max(0.0, self.running[place] - 1)
            if not self.running[place]:
                self.queue_s[place] = 0.0  # removes rounding errors


def _salt(replica: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(replica.encode()).digest()[:8], "little"))


HELD = "kv_held"  # metric of a replica: the share of the pool that running requests need
WAITING = "waiting"  # requests that wait for a slot there


class QueueAndKVPolicy:
    """An autoscaling policy of Ray Serve by running requests and, if some wait, by the size of the pools.

    Args:
        kv_pressure: The share of a pool that running requests may need.
    """

    def __init__(self, kv_pressure: float) -> None:
        self._kv_pressure = kv_pressure

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, within the bounds. context: ray.serve.config.AutoscalingContext."""
        now = context.current_num_replicas
        if not now:
            return int(context.target_num_replicas), {}
        by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        told = context.aggregated_metrics or {}
        held, waiting = told.get(HELD, {}).values(), sum(told.get(WAITING, {}).values())
        by_memory = sum(held) / self._kv_pressure if waiting else 0.0
        wanted = math.ceil(max(by_requests, by_memory))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return int(min(max(wanted, least), most)), {}
