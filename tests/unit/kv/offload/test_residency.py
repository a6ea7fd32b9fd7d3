"""Residency: segments move between a pool and the tiers below it, and come back as they were or not at all."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.loader import Coming
from inlay.slots import cut
from tests.raising import PanicException
from tests.unit.kv.accounting import audit
from tests.unit.kv.offload.memory import MemoryTier
from tests.unit.kv.offload.segments import filled, spec_of
from tests.unit.kv.offload.site import Site
from tests.unit.kv.offload.watched_storage import Held

ONE, TWO, THREE = (spec_of(number, tokens) for number, tokens in ((1, 50), (2, 30), (3, 100)))


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path, 1 << 30)
    yield tier
    tier.close()


def test_evicted_segments_are_read_back_unchanged(disk):
    site = Site([disk])
    for spec in (ONE, TWO):
        site.compute(spec)
    site.written()
    site.store.clear()
    assert len(site.store) == 0
    site.bring_up(ONE, TWO)
    assert all(site.lies_right(spec) for spec in (ONE, TWO))
    assert site.residency.loaded == {"disk": 80}
    audit(site.store)
    site.close()


def test_copied_segment_keeps_its_memory_until_released(disk, monkeypatch):
    """Otherwise a request that finds no room in between would be refused, although the room is about to come back."""
    site, copied, go_on = Site([disk]), threading.Event(), threading.Event()

    def put(tier, *args):
        copied.set()
        assert go_on.wait(60)

    monkeypatch.setattr(DiskTier, "put", put)
    site.compute(ONE)
    assert copied.wait(60)
    before = site.residency.room_version
    assert site.residency.holding
    site.residency.poll()
    assert not site.residency.holding
    assert site.residency.room_version != before
    go_on.set()
    site.written()
    site.close()


def test_segments_are_written_in_the_order_of_their_computation(disk, monkeypatch):
    site, go_on, order = Site([disk]), threading.Event(), []

    def put(tier, record, slabs):
        assert go_on.wait(60)
        order.append(record.key)

    monkeypatch.setattr(DiskTier, "put", put)
    for spec in (ONE, TWO, THREE):
        site.compute(spec)
    go_on.set()
    site.written()
    assert order == [ONE.key, TWO.key, THREE.key]
    site.close()


def test_device_host_disk(disk):
    """A segment is written to all tiers and read from the nearest. A read from disk copies it to the host too."""
    host = MemoryTier()
    site = Site([host, disk])
    site.compute(ONE)
    site.written()
    assert host.holds(ONE.key)
    assert disk.holds(ONE.key)
    site.store.clear()
    site.bring_up(ONE)
    assert (site.lies_right(ONE), host.asked, disk.stats().hits) == (True, [ONE.key], 0)
    host.delete(ONE.key)
    site.store.clear()
    site.bring_up(ONE)
    assert (site.lies_right(ONE), host.asked, disk.stats().hits) == (True, [ONE.key], 1)
    site.settled()
    assert host.holds(ONE.key)
    site.store.clear()
    host.broken.add(ONE.key)
    site.bring_up(ONE)
    assert site.lies_right(ONE), "where one tier fails, the next is asked"
    audit(site.store)
    site.close()


def test_only_the_evicted_part_is_read(disk):
    """A segment loses its end first; the rest stays in its slots."""
    site = Site([disk])
    site.compute(THREE)
    site.written()
    (segment,) = site.store
    before = segment.slots
    with site.store.hold(site.store.longest(THREE, most=32)):
        site.store.clear()
    assert segment.tokens == 32
    site.bring_up(THREE)
    assert site.lies_right(THREE)
    assert site.store.get(THREE).slots[0].first == before[0].first
    assert site.residency.loaded == {"disk": 68}
    audit(site.store)
    site.close()


def test_damaged_file_is_a_miss_and_not_retried(disk):
    site = Site([disk])
    site.compute(ONE)
    site.written()
    site.store.clear()
    path = disk.path(ONE.key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    site.bring_up(ONE)
    assert len(site.store) == 0
    assert not site.residency.below(ONE.key)
    audit(site.store)
    site.compute(ONE)
    site.written()
    site.store.clear()
    site.bring_up(ONE)
    assert site.lies_right(ONE), "it was written again"
    site.close()


def test_late_load_is_not_waited_for_and_keeps_its_slots(disk, tmp_path):
    filled(tmp_path, ONE, TWO)
    slow, go_on = DiskTier(tmp_path, 1 << 30), threading.Event()
    get = slow.get
    slow.get = lambda *asked: (go_on.wait(30), get(*asked))
    site = Site([slow], timeout_s=0.05)
    assert site.residency.bring_up([(ONE, site.store.longest(ONE))]) is Coming.ON_ITS_WAY
    free = site.pool.free_chunks
    while site.residency.moving:
        site.residency.wait(0.01)
        site.residency.poll()
    assert not site.residency.below(ONE.key)
    assert not site.residency.below(TWO.key), "nobody else is sent to a reader that hangs"
    assert site.pool.free_chunks == free, "it may still write into its slots"
    go_on.set()
    while site.residency.bringing([ONE.key]):
        site.residency.wait(10)
        site.residency.poll()
    assert site.residency.below(TWO.key)
    audit(site.store)
    site.close()


def test_slots_are_kept_until_their_copy_ends(disk):
    """A copy to a tier is not overtaken by the next computation in the same slots."""
    site = Site([disk], tokens=64)
    site.storage.before_read = held = Held()
    site.compute(ONE)
    assert held.reached.wait(30)
    site.store.clear()
    assert site.store.get(ONE) is not None
    assert site.pool.allocate(64) is None
    held.go_on.set()
    site.written()
    site.store.clear()
    assert len(site.store) == 0
    site.bring_up(ONE)
    assert site.lies_right(ONE)
    site.close()


def test_segment_evicted_before_its_write_is_not_written(disk):
    site = Site([disk])
    site.storage.before_read = held = Held()
    site.compute(ONE)
    site.compute(TWO)
    site.store.clear()  # the first is held, the second only waits
    held.go_on.set()
    site.written()
    assert disk.holds(ONE.key)
    assert not disk.holds(TWO.key)
    assert site.residency.not_written == 1
    site.close()


def test_forgotten_segment_is_removed_from_every_tier(disk):
    site = Site([disk])
    site.compute(ONE)
    site.written()
    site.storage.before_read = held = Held()
    site.compute(TWO)
    site.compute(THREE)
    for spec in (ONE, TWO, THREE):
        site.residency.forget(spec.key)
    site.store.clear()
    assert len(site.store) == 0, "nothing of it is held any more"
    held.go_on.set()
    site.written()
    site.close()
    assert not list(disk.folder.glob("*.safetensors"))


def test_invalid_numbers_are_not_written(disk):
    site = Site([disk])
    room = site.store.allocate(50)
    slots = cut(room, 0, 50)
    site.storage.keys[1][:, slots[0].first + 3, 5] = np.nan
    site.store.insert(ONE, slots)
    site.residency.save(ONE)
    site.written()
    assert not disk.holds(ONE.key)
    site.close()


def test_segment_too_large_for_the_pool_is_not_loaded(disk, tmp_path):
    filled(tmp_path, THREE)
    site = Site([DiskTier(tmp_path, 1 << 30)], tokens=96)
    assert site.residency.bring_up([(THREE, site.store.longest(THREE))]) is Coming.NOT
    audit(site.store)
    site.close()


def test_fault_at_a_loaded_segment_leaks_no_memory(disk, monkeypatch):
    """Its slots belong to the store."""
    site = Site([disk])
    site.compute(ONE)
    site.written()
    site.store.clear()

    def fail(spec):
        raise RuntimeError("nobody hears of it")

    monkeypatch.setattr(site.residency.misses, "stored", fail)
    with pytest.raises(RuntimeError, match="nobody hears of it"):
        site.bring_up(ONE)
    assert site.lies_right(ONE)
    site.store.clear()
    assert site.pool.free_chunks == site.pool.chunks
    assert not site.residency.bringing([ONE.key])
    site.close()


def test_fault_of_any_kind_ends_only_one_read(disk, caplog):
    site = Site([disk])
    for spec in (ONE, TWO):
        site.compute(spec)
    site.written()
    site.store.clear()
    get, faults = disk.get, [PanicException("it panics")]

    def panic(*asked):
        if faults:
            raise faults.pop()
        get(*asked)

    disk.get = panic
    site.bring_up(ONE)
    assert site.store.get(ONE) is None
    site.bring_up(TWO)  # by the same thread, which has reported the fault by then
    assert site.lies_right(TWO)
    assert "it panics" in caplog.text
    site.close()


def test_queued_write_is_queued_once(tmp_path):
    """A repeated request does not queue a second write, and a forgotten segment is not written."""
    slow, go_on = DiskTier(tmp_path, 1 << 30), threading.Event()
    put = slow.put
    slow.put = lambda *asked: (go_on.wait(30), put(*asked))[1]
    site = Site([slow])
    site.compute(ONE)
    for _ in range(3):
        for spec in (TWO, THREE):
            if site.store.get(spec) is None:
                site.compute(spec)
            site.residency.save(spec)
    assert site.residency.waiting == 3
    site.residency.forget(THREE.key)
    assert site.residency.waiting == 2
    go_on.set()
    site.written()
    assert [slow.holds(spec.key) for spec in (ONE, TWO, THREE)] == [True, True, False]
    site.close()


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_segment_written_with_a_codec_is_read_as_its_form(tmp_path, codec):
    site = Site([DiskTier(tmp_path, 1 << 30, codec)])
    form = site.form(ONE, codec)
    site.compute(ONE)
    site.written()
    assert site.lies_right(ONE), "what was computed stays what it is"
    site.store.clear()
    assert not site.residency.below(ONE.key)
    assert site.residency.below(form.key)
    site.bring_up(form)
    assert site.lies_right(form)
    assert site.store.get(ONE) is None
    assert [each.key for each in site.residency.forms(ONE)] == [ONE.key, form.key]
    audit(site.store)
    site.close()


def test_each_tier_has_its_own_codec(tmp_path):
    """Lossless in the host's memory, and lossy on disk; a form that is loaded is copied as that form."""
    host, disk = MemoryTier(), DiskTier(tmp_path, 1 << 30, "int8")
    site = Site([host, disk])
    form = site.form(ONE, "int8")
    site.compute(ONE)
    site.written()
    assert (host.holds(ONE.key), host.holds(form.key)) == (True, False)
    assert (disk.holds(ONE.key), disk.holds(form.key)) == (False, True)
    host.delete(ONE.key)
    site.store.clear()
    site.bring_up(form)
    site.settled()
    assert (host.holds(ONE.key), host.holds(form.key)) == (False, True)
    site.store.clear()
    site.bring_up(form)
    assert site.lies_right(form)
    assert host.asked == [form.key]
    site.close()


def test_rest_of_a_partly_evicted_form_is_read(tmp_path):
    site = Site([DiskTier(tmp_path, 1 << 30, "int8")])
    form = site.form(THREE, "int8")
    site.compute(THREE)
    site.written()
    site.store.clear()
    site.bring_up(form)
    with site.store.hold(site.store.longest(form, most=32)):
        site.store.clear()
    assert site.store.tokens == 32
    site.bring_up(form)
    assert site.lies_right(form)
    assert site.residency.loaded == {"disk": 168}
    audit(site.store)
    site.close()


def test_lossy_and_computed_forms_coexist(tmp_path):
    site = Site([DiskTier(tmp_path, 1 << 30, "int8")])
    form = site.form(ONE, "int8")
    site.compute(ONE)
    site.written()
    site.bring_up(form)
    assert site.lies_right(ONE)
    assert site.lies_right(form)
    assert site.store.longest(ONE).segments != site.store.longest(form).segments
    audit(site.store)
    site.close()


def test_all_forms_of_a_segment_are_forgotten(tmp_path):
    disk = DiskTier(tmp_path, 1 << 30, "int8")
    site = Site([disk])
    site.compute(ONE)
    site.written()
    for form in site.residency.forms(ONE):
        site.residency.forget(form.key)
    site.settled()
    site.close()
    assert not list(disk.folder.glob("*.safetensors"))
