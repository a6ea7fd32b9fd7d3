"""How many replicas there should be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inlay.cluster.loads import HELD, WAITING, QueueAndKVPolicy


@pytest.mark.parametrize(
    ("under_way", "held", "waiting", "wanted"),
    [
        (0, [0.0, 0.0], 0, 1),  # no fewer than the least
        (16, [0.2, 0.2], 0, 2),
        (17, [0.2, 0.2], 0, 3),
        (500, [0.2, 0.2], 0, 8),  # no more than the most
        (10, [1.0, 1.0], 3, 3),  # requests wait, since the pools are full
        (10, [1.0, 1.0], 0, 2),  # no request waits
        (10, [], 0, 2),
    ],
)
def test_replicas_follow_requests_and_pools(under_way: int, held: list[float], waiting: int, wanted: int):
    told = {HELD: dict(enumerate(held)), WAITING: {0: float(waiting)}}
    context = SimpleNamespace(
        current_num_replicas=2,
        target_num_replicas=2,
        total_num_requests=under_way,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 8.0),
        aggregated_metrics=told,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )
    assert QueueAndKVPolicy(0.8)(context) == (wanted, {})
    context.current_num_replicas = 0
    assert QueueAndKVPolicy(0.8)(context) == (2, {})
