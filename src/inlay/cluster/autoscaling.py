"""The wanted number of replicas, by running requests and by their share of the KV pools."""

from __future__ import annotations

import math
from typing import Any

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
