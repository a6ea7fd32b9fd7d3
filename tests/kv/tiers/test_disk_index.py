"""Changes of a folder's index: a process reads the rows that another one changed, and no others."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from inlay.kv.tiers import disk, disk_index
from inlay.kv.tiers.disk import DiskTier
from inlay.kv.tiers.disk_index import DiskIndex
from inlay.kv.tiers.tier import TierEntry

from .segments import record_of, spec_of

ENTRY = TierEntry.of(record_of(spec_of(1)), 8192, 1.0)


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def entry(number: int) -> TierEntry:
    return replace(ENTRY, key=key(number))


@pytest.fixture
def index(tmp_path: Path) -> DiskIndex:
    return DiskIndex(tmp_path / "index.sqlite")


def test_only_changed_rows_are_read(index: DiskIndex):
    index.add([entry(number) for number in range(100)])
    seen = index.last_change()
    assert index.changed_since(seen) == {}
    index.used([(key(5), 7.0)])
    index.remove([key(8)])
    index.add([entry(200)])
    index.pin(key(9), True)
    assert index.changed_since(seen) == {
        key(5): replace(entry(5), used=7.0, uses=1),
        key(8): None,
        key(200): entry(200),
        key(9): replace(entry(9), pinned=True),
    }


def test_a_row_that_changes_often_is_one_change(index: DiskIndex):
    index.add([entry(1)])
    seen = index.last_change()
    for at in range(50):
        index.used([(key(1), float(at))])
    changed = index.changed_since(seen)
    assert changed is not None
    assert [row.uses for row in changed.values() if row is not None] == [50]


def test_forgotten_removals_ask_for_the_whole_index(index: DiskIndex, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_index, "MOST_REMOVED", 3)
    index.add([entry(number) for number in range(10)])
    first = index.last_change()
    index.remove([key(number) for number in range(6)])
    last = index.last_change()
    index.forget_removed()
    assert index.changed_since(first) is None
    assert index.changed_since(last) == {}
    kept = index.changed_since(last - 3)
    assert kept == {key(number): None for number in (3, 4, 5)}


def test_a_tier_never_reads_the_whole_index_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "LOOK_S", 0.0)
    tier = DiskTier(tmp_path, 1 << 30)
    other = DiskIndex(tmp_path / "v1" / "index.sqlite")
    other.add([entry(number) for number in range(50)])
    tier.refresh()
    monkeypatch.setattr(DiskIndex, "entries", lambda self: pytest.fail("the whole index was read"))
    other.used([(key(3), time.time())])
    tier.refresh()
    other.remove([key(4)])
    tier.refresh()
    assert tier.holds(key(3))
    assert not tier.holds(key(4))
    tier.close()
    other.close()


def test_two_processes_over_one_folder_agree_after_every_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "LOOK_S", 0.0)
    monkeypatch.setattr(disk_index, "MOST_REMOVED", 5)
    rng = random.Random(0)
    tier = DiskTier(tmp_path, 1 << 30)
    other = DiskIndex(tmp_path / "v1" / "index.sqlite")
    for _ in range(200):
        for _ in range(rng.randrange(4)):
            number = rng.randrange(20)
            match rng.randrange(5):
                case 0:
                    other.remove([key(number)])
                case 1:
                    other.used([(key(number), rng.random() * 100)])
                case 2:
                    other.pin(key(number), rng.random() < 0.5)
                case 3:
                    other.forget_removed()
                case _:
                    other.add([entry(number)])
        tier.refresh()
        assert {each.key for each in other.entries()} == {key(n) for n in range(20) if tier.holds(key(n))}
    tier.close()
    other.close()
