"""A router's map of the replicas' stored modules."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest

from inlay.cluster.affinity import ResidencyMap
from inlay.errors import ParameterError
from inlay.kv.changes import StoreChanges
from tests.clock import ManualClock
from tests.raising import raises


def update(
    first: int, last: int, added: list[int], removed: list[int] | None = None, *, whole: bool = False, epoch: int = 1
) -> StoreChanges:
    return StoreChanges(epoch, first, last, array("Q", added), array("Q", removed or []), whole=whole)


def made(*replicas: str, clock: ManualClock | None = None, **settings: float) -> ResidencyMap:
    residency = ResidencyMap(clock=clock or ManualClock(), **settings)
    for replica in replicas:
        residency.join(replica)
    return residency


def holders(residency: ResidencyMap, key: int) -> set[str]:
    (mask,) = residency.masks([key])
    return {name for name in residency.replicas if mask >> residency.slot(name) & 1}


def test_changes_are_applied_in_order():
    residency = made("a", "b")
    assert residency.apply("a", update(0, 2, [10, 11], whole=True))
    assert residency.apply("b", update(0, 1, [11], whole=True))
    assert holders(residency, 10) == {"a"}
    assert holders(residency, 11) == {"a", "b"}
    assert residency.apply("a", update(2, 4, [12], [10]))
    assert holders(residency, 10) == set()
    assert holders(residency, 12) == {"a"}
    assert residency.heard("a") == (1, 4)


@pytest.mark.parametrize("changes", [update(3, 4, [12]), update(1, 4, [12]), update(2, 4, [12], epoch=9)])
def test_missing_changes_request_a_full_list(changes: StoreChanges):
    residency = made("a")
    residency.apply("a", update(0, 2, [10, 11], whole=True))
    assert not residency.apply("a", changes)
    assert residency.heard("a")[0] == 0  # no store has that epoch, so that all is sent
    assert residency.apply("a", update(0, 4, [11, 12], whole=True, epoch=9))
    assert holders(residency, 10) == set()
    assert holders(residency, 12) == {"a"}


def test_lost_replica_is_forgotten_at_once():
    residency = made("a", "b")
    residency.apply("a", update(0, 5000, list(range(1, 5001)), whole=True))
    residency.apply("b", update(0, 1, [7], whole=True))
    residency.forget("a")
    assert residency.masks([1, 2, 3]) == [0, 0, 0]
    assert holders(residency, 7) == {"b"}
    assert len(residency) > 3000  # no single call clears them all
    while residency.tidy():
        pass
    assert len(residency) == 1
    residency.join("c")  # may get the same bit
    assert holders(residency, 1) == set()


def test_sent_pieces_count_as_held_until_confirmed():
    clock = ManualClock()
    residency = made("a", clock=clock, history_s=10)
    residency.note("a", [5])
    assert holders(residency, 5) == {"a"}
    clock.now = 9.9
    assert holders(residency, 5) == {"a"}
    clock.now = 10.0
    assert holders(residency, 5) == set()
    residency.note("a", [5])
    residency.apply("a", update(0, 1, [5], whole=True))
    clock.now = 30.0
    assert holders(residency, 5) == {"a"}
    residency.note("a", [6])
    residency.apply("a", update(1, 3, [], [6]))  # it came and went
    assert holders(residency, 6) == set()


def test_lower_tiers_are_separate_from_pools():
    residency = made("a")
    residency.apply("a", StoreChanges(1, 0, 1, array("Q"), array("Q"), array("Q", [8, 9]), whole=True))
    assert residency.masks([8]) == [0]
    assert residency.masks_below([8, 9, 10]) == [1, 1, 0]
    residency.apply("a", StoreChanges(1, 1, 2, array("Q"), array("Q"), array("Q", [9])))
    assert residency.masks_below([8, 9]) == [0, 1]


def test_number_of_keys_is_bounded():
    residency = made("a", max_bytes=2**20)
    residency.apply("a", update(0, 20_000, list(range(20_000)), whole=True))
    assert len(residency) <= residency.most_keys
    assert residency.dropped >= 20_000 - residency.most_keys
    assert holders(residency, 19_999) == {"a"}  # the oldest go first
    with raises("parameter.out_of_range", ParameterError, names="1 MiB"):
        ResidencyMap(max_bytes=5)


def test_memory_for_many_replicas_and_modules_is_bounded():
    """Measures 10,000 modules twice and extrapolates to a million; the bound for a router is 1 GB."""
    names = [f"replica-{number}" for number in range(100)]
    draws = random.Random(1)
    shares: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(10_000):
        key = draws.getrandbits(64)
        for name in draws.sample(names, 2):
            shares[name].append(key)
    news = {name: update(0, len(keys), keys, whole=True) for name, keys in shares.items()}
    tracemalloc.start()
    residency = made(*names)
    for name in names:
        residency.apply(name, news[name])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(residency) == 10_000
    assert size / 10_000 < 400  # bytes a module: 0.4 GB for a million
