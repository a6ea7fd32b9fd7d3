"""Messages from replicas to an ingress arrive whole, and their counts add up."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields
from typing import Any

from inlay.cluster.transport import Status, summed
from inlay.kv.changes import StoreChanges
from inlay.types import EngineStats, ShadowStats, TierStats

NUMBERS = [field.name for field in fields(EngineStats) if field.type in ("int", "float")]


def stats_of(start: int, **more: Any) -> EngineStats:
    """Every number another one."""
    return EngineStats(**{name: start + i for i, name in enumerate(NUMBERS)}, **more)


def test_statistics_of_several_engines_are_summed():
    each = [stats_of(0), stats_of(100, busy=True), stats_of(30)]
    found = summed(each)
    assert "promoted_tokens" in NUMBERS
    assert "write_lag_s" in NUMBERS
    for name in NUMBERS:
        values = [getattr(one, name) for one in each]
        assert getattr(found, name) == (max(values) if name == "write_lag_s" else sum(values)), name
    assert found.busy
    assert not summed([stats_of(0)]).busy
    assert summed([]).waiting == 0


def test_status_round_trips_without_shadow_results():
    changes = StoreChanges("epoch", 3, 5, array("Q", [1, 2**63]), array("Q"), array("Q", [7]), False)
    tiers = {
        "disk": TierStats(segments=3, misses=(("late", 2),)),
        "shared": TierStats(up=False, misses=(("corrupt", 1), ("late", 4))),
    }
    sent = Status(stats_of(1, shadow=ShadowStats(samples=3), **tiers), changes).to_dict()
    found = Status.from_dict(sent)
    assert found == Status(stats_of(1, **tiers), changes)
    nothing = Status(stats_of(1), StoreChanges("epoch", 0, 0, array("Q"), array("Q"), None, True))
    assert Status.from_dict(nothing.to_dict()) == nothing
    json.dumps(sent["stats"])
