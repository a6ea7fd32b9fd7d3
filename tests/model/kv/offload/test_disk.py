"""The disk tier as a folder: quotas, pins, processes that share it or are killed in it, an index that is lost."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from inlay.errors import ParameterError
from inlay.kv.identity import labels_of
from inlay.kv.offload import disk, disk_index
from inlay.kv.offload.disk import LOOK_S, MOST_USES, DiskTier
from inlay.kv.offload.disk_index import DiskIndex
from inlay.kv.offload.tier import Miss, TierEntry, TierMissError
from inlay.kv.policies import POLICIES
from tests.counting import calls_of
from tests.raising import raises
from tests.unit.kv.offload.segments import filled, read, record_of, same, slabs_of, spec_of

SPECS = [spec_of(number) for number in range(1, 7)]


def size_of(tmp_path: Path) -> int:
    """Bytes of one file."""
    return filled(tmp_path / "one", SPECS[0]).stats().bytes


def held(tier: DiskTier) -> list[int]:
    """Which of SPECS a tier holds."""
    return [number for number, spec in enumerate(SPECS) if tier.holds(spec.key)]


def test_least_recently_used_is_evicted_and_pinned_stays(tmp_path):
    quota = 3 * size_of(tmp_path)
    tier = filled(tmp_path / "store", *SPECS[:3], quota=quota)
    tier.pin(SPECS[1].key, True)
    read(tier, record_of(SPECS[0]))
    for number in (3, 4):
        assert tier.put(record_of(SPECS[number]), slabs_of(SPECS[number]))
    assert held(tier) == [1, 3, 4]
    assert tier.stats().evictions == 2
    assert sum(path.stat().st_size for path in tier.folder.glob("*.safetensors")) == tier.stats().bytes <= quota
    tier.pin(SPECS[1].key, False)
    assert tier.put(record_of(SPECS[5]), slabs_of(SPECS[5]))
    assert held(tier) == [3, 4, 5]


def test_segment_larger_than_the_evictable_space_is_not_written(tmp_path):
    size = size_of(tmp_path)
    tier = filled(tmp_path / "store", SPECS[0], quota=size)
    tier.pin(SPECS[0].key, True)
    assert not tier.put(record_of(SPECS[1]), slabs_of(SPECS[1]))
    assert not DiskTier(tmp_path / "small", size - 1).put(record_of(SPECS[0]), slabs_of(SPECS[0]))
    assert held(tier) == [0]
    assert tier.stats().refused == 1


def test_restart_finds_segments_with_pins_and_uses(tmp_path):
    tier = filled(tmp_path, *SPECS[:2])
    read(tier, record_of(SPECS[0]))
    tier.pin(SPECS[1].key, True)
    tier.close()
    again = DiskTier(tmp_path, 1 << 30)
    assert [(entry.key, entry.uses, entry.pinned) for entry in again.iterate()] == [
        (SPECS[1].key, 0, True),
        (SPECS[0].key, 1, False),
    ]
    assert all(same(read(again, record_of(spec)), slabs_of(spec)) for spec in SPECS[:2])


@pytest.mark.parametrize("damage", ["lost", "empty", "noise", "another version", "wrong rows"])
def test_lost_or_damaged_index_is_rebuilt(tmp_path, damage):
    tier = filled(tmp_path, *SPECS[:3])
    tier.path(SPECS[2].key).unlink()
    tier.close()
    path = tier.folder / "index.sqlite"
    if damage == "wrong rows":
        with sqlite3.connect(path) as rows:
            rows.execute("UPDATE segments SET size = 1, tokens = 7")
            rows.execute("UPDATE segments SET key = ? WHERE key = ?", (SPECS[4].key, SPECS[1].key))
        rows.close()
    elif damage == "another version":
        with sqlite3.connect(path) as rows:
            rows.execute("PRAGMA user_version = 99")
        rows.close()
    else:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        if damage != "lost":
            path.write_bytes(b"" if damage == "empty" else random.Random(1).randbytes(20_000))
    again = DiskTier(tmp_path, 1 << 30)
    assert held(again) == [0, 1]
    assert sorted((entry.key, entry.tokens) for entry in again.iterate()) == sorted((s.key, 40) for s in SPECS[:2])
    assert again.stats().bytes == sum(file.stat().st_size for file in tier.folder.glob("*.safetensors"))
    assert same(read(again, record_of(SPECS[1])), slabs_of(SPECS[1]))


@pytest.mark.parametrize("index", ["kept", "lost", "of an earlier version"])
def test_segments_are_found_by_their_labels_after_a_restart(tmp_path, index):
    first, second = (labels_of(b"", "s", module) for module in "ab")
    tier = filled(tmp_path, SPECS[0], replace(SPECS[1], labels=first), replace(SPECS[2], labels=second))
    tier.pin(SPECS[2].key, True)
    tier.close()
    path = tier.folder / "index.sqlite"
    if index == "lost":
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
    elif index == "of an earlier version":
        with closing(sqlite3.connect(path)) as rows, rows:
            rows.execute("ALTER TABLE segments DROP COLUMN labels")
            rows.execute("UPDATE segments SET size = 1")  # as after a lost row: the files are read again
    again = DiskTier(tmp_path, 1 << 30)
    wanted = {label: {entry.key for entry in again.labelled([label])} for label in (*first, *second, b"none")}
    both = {SPECS[1].key, SPECS[2].key}
    assert wanted == {first[0]: both, first[1]: {SPECS[1].key}, second[1]: {SPECS[2].key}, b"none": set()}
    again.delete(SPECS[2].key)
    assert [entry.key for entry in again.labelled(first + second)] == [SPECS[1].key]
    assert held(again) == [0, 1]


def test_added_labels_are_seen_by_other_processes_and_after_a_restart(tmp_path, clock):
    spec, (added, _) = spec_of(1), labels_of(b"", "another")
    with closing(DiskTier(tmp_path, 1 << 20)) as one, closing(DiskTier(tmp_path, 1 << 20)) as other:
        one.add_labels(spec.key, [added])
        assert one.labelled([added]) == [], "it is not there yet"
        assert one.put(record_of(spec), slabs_of(spec))
        one.add_labels(spec.key, [added])
        clock.advance(LOOK_S)
        other.refresh()
        for tier in (one, other):
            assert [entry.key for entry in tier.labelled([added])] == [spec.key]
    with closing(DiskTier(tmp_path, 1 << 20)) as later:
        assert [entry.key for entry in later.labelled([added])] == [spec.key]


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_segment_stored_by_two_processes_has_the_labels_of_both(tmp_path, index):
    """The second one has not yet seen that the first one stored it."""
    specs = [replace(spec_of(1), labels=labels_of(b"", name)) for name in ("one", "two")]
    with closing(DiskTier(tmp_path, 1 << 30)) as one, closing(DiskTier(tmp_path, 1 << 30)) as other:
        for tier, spec in zip((one, other), specs, strict=True):
            assert tier.put(record_of(spec), slabs_of(spec))
        assert other.stats().writes == 0
    for path in one.folder.glob("index.sqlite*") if index == "lost" else ():
        path.unlink()
    with closing(DiskTier(tmp_path, 1 << 30)) as again:
        for spec in specs:
            assert again.labelled(spec.labels)
            assert again.labelled(spec.labels[1:])


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_labels_added_by_two_processes_are_all_kept(tmp_path, index, clock):
    spec, names = spec_of(1), ("one", "two", "both", "half")
    first, second, both, half = (labels_of(b"", name)[0] for name in names)
    with closing(filled(tmp_path, spec)) as one, closing(DiskTier(tmp_path, 1 << 30)) as other:
        one.add_labels(spec.key, [first, both])
        beside = one.path(spec.key).with_suffix(".labels")
        with beside.open("ab") as file:
            file.write(half[:5])  # by a process that has ended
        other.add_labels(spec.key, [second, both])
        clock.advance(LOOK_S)
        for tier in (one, other):
            tier.refresh()
            assert all(tier.labelled([label]) for label in (first, second, both))
    for path in beside.parent.glob("index.sqlite*") if index == "lost" else ():
        path.unlink()
    with closing(DiskTier(tmp_path, 1 << 30)) as again:
        (entry,) = again.iterate()
        assert entry.labels == (*spec.labels, first, both, second)


def test_added_labels_outlive_the_index_and_end_with_the_segment(tmp_path):
    added = [label for name in ("one", "two") for label in labels_of(b"", name)]
    with closing(filled(tmp_path, *SPECS[:2])) as tier:
        for spec, label in itertools.product(SPECS[:2], added):
            tier.add_labels(spec.key, [label])
        beside = tier.path(SPECS[0].key).with_suffix(".labels")
        tier.path(SPECS[1].key).unlink()
    for path in tier.folder.glob("index.sqlite*"):
        path.unlink()
    with closing(DiskTier(tmp_path, 1 << 30)) as again:
        keys = [[entry.key for entry in again.labelled([label])] for label in added]
        assert keys == [[SPECS[0].key]] * 4
        assert list(tier.folder.glob("*.labels")) == [beside]
        again.delete(SPECS[0].key)
        assert not beside.exists()


def test_file_that_cannot_be_removed_is_reported(tmp_path, caplog):
    spec = spec_of(1)
    with closing(DiskTier(tmp_path, 1 << 20)) as tier:
        assert tier.put(record_of(spec), slabs_of(spec))
        tier.path(spec.key).unlink()
        assert tier.delete(spec.key)
        assert caplog.text == "", "somebody else has removed it"
        tier.path(spec.key).mkdir()
        tier.delete(spec.key)
        assert f"{tier.path(spec.key)} cannot be removed" in caplog.text


def test_two_tiers_on_one_folder_see_each_others_changes(tmp_path, clock):
    one, other = filled(tmp_path, *SPECS[:2]), DiskTier(tmp_path, 1 << 30)
    assert one.put(record_of(SPECS[2]), slabs_of(SPECS[2]))
    assert held(other) == [0, 1]
    one.delete(SPECS[0].key)
    with pytest.raises(TierMissError) as miss:
        read(other, record_of(SPECS[0]))
    assert miss.value.reason is Miss.ABSENT
    clock.advance(LOOK_S)
    other.refresh()
    assert held(other) == [1, 2]
    assert same(read(other, record_of(SPECS[2])), slabs_of(SPECS[2]))


@pytest.mark.parametrize("most", [disk_index.MOST_CHANGES, 1])
def test_only_new_changes_of_other_processes_are_read(tmp_path, monkeypatch, clock, most):
    """Also where so many were missed that all rows have to be read; uses are no change."""

    def refresh(tier: DiskTier) -> None:
        clock.advance(LOOK_S)
        tier.refresh()

    one, other = filled(tmp_path, *SPECS), DiskTier(tmp_path, 1 << 30)
    refresh(one)
    monkeypatch.setattr(disk_index, "MOST_CHANGES", most)
    rows = calls_of(monkeypatch, disk_index, "entry_of")
    for _ in range(3):
        read(other, record_of(SPECS[0]))
        refresh(other)
        refresh(one)
    assert rows == [], "others' uses are looked up when something is to go"
    new = [spec_of(number) for number in (21, 22)]
    for spec in new:
        other.put(record_of(spec), slabs_of(spec))
    other.pin(SPECS[1].key, True)
    other.delete(SPECS[2].key)
    refresh(one)
    assert len(rows) == (3 if most > 1 else len(SPECS) + 1)
    assert all(one.holds(spec.key) for spec in new)
    assert not one.holds(SPECS[2].key)
    rows.clear()
    refresh(one)
    assert rows == []


def test_write_during_a_refresh_is_found(tmp_path, monkeypatch, clock):
    one = filled(tmp_path, spec_of(1))
    other = DiskTier(tmp_path, 1 << 30)
    other.put(record_of(spec_of(2)), slabs_of(spec_of(2)))
    changed, written = DiskIndex.changed_since, threading.Event()

    def put():
        one.put(record_of(spec_of(3)), slabs_of(spec_of(3)))
        written.set()

    def meanwhile(index, number):
        found = changed(index, number)
        threading.Thread(target=put, daemon=True).start()
        written.wait(0.5)
        return found

    clock.advance(LOOK_S)
    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "changed_since", meanwhile)
        one.refresh()
    assert written.wait(30)
    assert all(one.holds(spec_of(number).key) for number in (1, 2, 3))


def test_uses_are_saved_without_a_refresh(tmp_path):
    tier = filled(tmp_path, spec_of(1))
    for _ in range(MOST_USES + 2):
        read(tier, record_of(spec_of(1)))
    (entry,) = DiskTier(tmp_path, 1 << 30).iterate()
    assert entry.uses == MOST_USES


def test_eviction_policy_decides_which_segment_is_evicted(tmp_path):
    """Segments that were read go after those that never were. Under least recent use they would go first."""
    for policy, stays in (("lru", [1, 2]), ("lfu", [0, 2]), ("lru2", [0, 2]), ("cost", [0, 2])):
        folder = tmp_path / policy
        tier = DiskTier(folder, 2 * size_of(tmp_path / f"{policy} size"), policy=POLICIES[policy])
        assert tier.put(record_of(SPECS[0]), slabs_of(SPECS[0]))
        for _ in range(3):
            read(tier, record_of(SPECS[0]))
        assert tier.put(record_of(SPECS[1]), slabs_of(SPECS[1]))
        assert tier.put(record_of(SPECS[2]), slabs_of(SPECS[2]))
        assert held(tier) == stays, policy
        tier.close()


def test_old_eviction_scores_fade_on_disk(tmp_path):
    tier = DiskTier(tmp_path / "s", 2 * size_of(tmp_path / "size"), policy=POLICIES["lfu"])
    popular, others = spec_of(50), [spec_of(51 + number) for number in range(12)]
    assert tier.put(record_of(popular), slabs_of(popular))
    for _ in range(4):
        read(tier, record_of(popular))
    for spec in others:
        assert tier.put(record_of(spec), slabs_of(spec))
        read(tier, record_of(spec))
    assert not tier.holds(popular.key)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_eviction_cost_does_not_grow_with_the_folder(tmp_path, monkeypatch, clock, policy):
    """Work is steps of SQLite's machine and ranks; twenty writes evict twenty of many that another process wrote."""
    connect, connections = sqlite3.connect, []

    def connected(*about, **options):
        connections.append(connect(*about, **options))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", connected)
    specs, work = [spec_of(50 + number) for number in range(20)], {}
    size = size_of(tmp_path)
    for rows in (1_000, 10_000):
        ranks, steps = [], []
        tier = DiskTier(
            tmp_path / f"{rows}",
            size * rows,
            policy=lambda use, cost, ranks=ranks: ranks.append(use) or POLICIES[policy](use, cost),
        )
        own = connections[-1]
        others = DiskIndex(tier.folder / "index.sqlite")
        entry = TierEntry.of(record_of(SPECS[0]), size, 0.0)
        keys = [number.to_bytes(32, "big") for number in range(1, rows + 1)]
        others.add(replace(entry, key=key, used=float(number)) for number, key in enumerate(keys))
        clock.advance(LOOK_S)
        tier.refresh()
        assert tier.stats().segments == rows
        ranks.clear()
        own.set_progress_handler(lambda steps=steps: steps.append(1), 10)
        for spec in specs:
            assert tier.put(record_of(spec), slabs_of(spec))
        work[rows] = len(ranks), len(steps)
        assert [tier.holds(key) for key in keys[:21]] == [False] * 20 + [True]
        tier.close()
        others.close()
    assert all(many < 1.5 * few + 20 for few, many in zip(work[1_000], work[10_000], strict=True)), work


def test_pins_reads_and_removals_of_others_count_before_eviction(tmp_path):
    quota = 4 * size_of(tmp_path)
    tier = filled(tmp_path / "s", *SPECS[:4], quota=quota)
    other = DiskTier(tmp_path / "s", quota)
    other.pin(SPECS[0].key, True)
    read(other, record_of(SPECS[1]))
    other.close()  # which notes the use
    assert tier.put(record_of(SPECS[4]), slabs_of(SPECS[4]))
    assert held(tier) == [0, 1, 3, 4]
    again = DiskTier(tmp_path / "s", quota)
    assert again.drop(SPECS[3].key)
    assert tier.put(record_of(SPECS[5]), slabs_of(SPECS[5])), "there is room, and nothing goes for it"
    assert sorted(path.stem for path in tier.folder.glob("*.safetensors")) == sorted(
        SPECS[number].key.hex() for number in (0, 1, 4, 5)
    )


@pytest.mark.parametrize("how", ["evicted", "damaged", "deleted by hand"])
def test_rewriting_a_segment_keeps_its_lifetime(tmp_path, clock, how):
    tier = filled(tmp_path / "s", SPECS[0], quota=size_of(tmp_path))
    tier.expire(SPECS[0].key, 300)
    path = tier.path(SPECS[0].key)
    if how == "evicted":
        assert tier.put(record_of(SPECS[1]), slabs_of(SPECS[1]))
    elif how == "damaged":
        path.write_bytes(b"damaged")
        with pytest.raises(TierMissError):
            read(tier, record_of(SPECS[0]))
    else:
        path.unlink()
        tier.reconcile()
    assert not path.exists()
    clock.advance(200)
    assert tier.put(record_of(SPECS[0]), slabs_of(SPECS[0]))
    assert tier.left_s(SPECS[0].key) == pytest.approx(100)
    tier.close()
    clock.advance(101)
    assert held(DiskTier(tmp_path / "s", 1 << 30)) == []


def test_deletion_ends_a_lifetime_and_pending_lifetimes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("inlay.kv.offload.disk_index.MOST_AWAITED", 2)
    tier = filled(tmp_path, SPECS[0])
    for number, ttl_s in enumerate((50, 300, 60, 1e6, 70)):
        tier.expire(SPECS[number].key, ttl_s)
    tier.reconcile()
    kept = [tier.left_s(spec.key) is not None for spec in SPECS]
    assert kept == [True, True, False, True, False, False], "of those without a file, the two that end last"
    assert tier.delete(SPECS[0].key)
    assert tier.left_s(SPECS[0].key) is None


def test_lifetimes_survive_restarts_and_clock_jumps(tmp_path, clock):
    one = DiskTier(tmp_path, 1 << 30)
    one.expire(SPECS[0].key, 300)  # before it is written
    one.expire(SPECS[1].key, 300)
    one.expire(SPECS[1].key, 3600)
    one.expire(SPECS[1].key, 60)
    one.expire(SPECS[2].key, math.inf)
    for spec in SPECS[:3]:
        assert one.put(record_of(spec), slabs_of(spec))
    one.close()
    clock.advance(299)
    assert held(DiskTier(tmp_path, 1 << 30)) == [0, 1, 2]
    clock.advance(2)
    assert held(DiskTier(tmp_path, 1 << 30)) == [1, 2]
    clock.jump(-1e6)  # a clock that went back does not extend a lifetime
    assert held(DiskTier(tmp_path, 1 << 30)) == [1, 2]
    clock.advance(3601)
    assert held(DiskTier(tmp_path, 1 << 30)) == [2]
    clock.advance(1e9)
    assert held(DiskTier(tmp_path, 1 << 30)) == [2]


def test_age_of_evicted_segments_is_reported(tmp_path, clock):
    tier = filled(tmp_path / "s", SPECS[0], quota=size_of(tmp_path))
    clock.advance(70)
    assert tier.put(record_of(SPECS[1]), slabs_of(SPECS[1]))
    assert (tier.stats().evictions, tier.stats().evicted_age_s) == (1, pytest.approx(70))


def test_only_one_process_evicts_at_a_time(tmp_path, monkeypatch):
    size = size_of(tmp_path)
    one, other = filled(tmp_path / "s", SPECS[0], quota=size), DiskTier(tmp_path / "s", size)
    monkeypatch.setattr(disk, "LOCK_S", 0.05)  # two real seconds
    with one.evicting() as mine:
        assert mine
        assert not other.put(record_of(SPECS[1]), slabs_of(SPECS[1])), "it waits no longer than that"
    assert other.put(record_of(SPECS[1]), slabs_of(SPECS[1]))
    assert held(other) == [1]


def test_read_only_folder_can_be_read(tmp_path, monkeypatch, caplog):
    """The tests may run as root, which no mode stops, so the system's refusals are simulated."""
    filled(tmp_path, *SPECS[:2]).close()
    opened = os.open

    def refuse(path, flags, *rest, **named):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    tier = DiskTier(tmp_path, 1 << 30)
    assert not tier.put(record_of(SPECS[2]), slabs_of(SPECS[2]))
    assert same(read(tier, record_of(SPECS[1])), slabs_of(SPECS[1]))
    assert "Read-only file system" in caplog.text


def test_unusable_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with raises("cache.unusable_store", ParameterError, names="file"):
        DiskTier(tmp_path / "file", 1 << 30)


def test_times_in_the_future_and_the_past_are_accepted(tmp_path, clock):
    """A clock that jumps changes the order of eviction, and nothing else."""
    size = size_of(tmp_path)
    tier = DiskTier(tmp_path / "s", 3 * size)
    for number, at in enumerate((2e9, 0.0, -5.0, 4e9)):
        clock.jump(at - time.time())
        assert tier.put(record_of(SPECS[number]), slabs_of(SPECS[number]))
    assert held(tier) == [0, 1, 3]
    assert all(same(read(tier, record_of(SPECS[number])), slabs_of(SPECS[number])) for number in held(tier))


def killed(folder: Path, times: int) -> None:
    """Kill a writing process at different moments, and check the files that remain."""
    moments = random.Random(7)
    for seed in range(times):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.kv.offload.writing", str(folder), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        time.sleep(moments.uniform(0.0, 0.05))  # no synchronisation: the moment is to be any
        writer.kill()
        writer.wait()
        writer.stdout.close()
        tier = DiskTier(folder, 1 << 20)
        assert not list(tier.folder.glob(".draft-*"))
        keys = {bytes.fromhex(path.stem) for path in tier.folder.glob("*.safetensors")}
        assert keys == {entry.key for entry in tier.iterate()}
        for number in range(1, 21):
            spec = spec_of(number, tokens=300)
            if spec.key in keys:
                assert same(read(tier, record_of(spec)), slabs_of(spec))
        assert dict(tier.stats().misses) == {}
        tier.close()


@pytest.mark.long
def test_killed_writers_leave_only_whole_files(tmp_path):
    killed(tmp_path, 20)


@pytest.mark.slow
def test_200_killed_writers_leave_only_whole_files(tmp_path):
    killed(tmp_path, 200)


def test_drafts_of_active_writers_are_kept(tmp_path):
    import fcntl

    tier = filled(tmp_path, SPECS[0])
    for name in (".draft-alive", ".draft-dead"):
        (tier.folder / name).write_bytes(b"some")
    with (tier.folder / ".draft-alive").open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        DiskTier(tmp_path, 1 << 30)
        assert [path.name for path in tier.folder.glob(".draft-*")] == [".draft-alive"]


def test_many_threads_on_two_tiers_of_one_folder(tmp_path):
    """Reads, writes, evictions, pins and removals at once: every read gives just what was asked for, or nothing."""
    quota = 3 * size_of(tmp_path)
    tiers = [DiskTier(tmp_path / "shared", quota) for _ in range(2)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        moves, tier = random.Random(seed), tiers[seed % 2]
        for _ in range(30):
            spec = moves.choice(SPECS)
            try:
                move = moves.choice(("get", "get", "put", "put", "pin", "delete", "refresh"))
                if move == "get" and not same(read(tier, record_of(spec)), slabs_of(spec)):
                    wrong.append("another segment's keys and values")
                elif move == "put":
                    tier.put(record_of(spec), slabs_of(spec))
                elif move == "pin":
                    tier.pin(spec.key, moves.random() < 0.2)
                elif move == "delete":
                    tier.delete(spec.key)
                else:
                    tier.refresh()
            except TierMissError as miss:
                if miss.reason is not Miss.ABSENT:
                    wrong.append(str(miss))
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    tiers[0].reconcile()
    entries = list(tiers[0].iterate())
    assert {entry.key for entry in entries} == {bytes.fromhex(p.stem) for p in tiers[0].folder.glob("*.safetensors")}
    for entry in entries:
        tiers[0].verify(entry.key)
