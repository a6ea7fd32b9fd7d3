"""Demotion: the pool copies chunks to the host tier before it evicts them, and loads them back unchanged."""

from __future__ import annotations

import threading
import time

import pytest

from inlay.errors import CapacityError
from inlay.kv.identity import SegmentSpec, specify
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.host import PAGE, HostTier
from inlay.kv.offload.loader import Coming
from inlay.kv.pool import PrefixMatch
from tests.unit.kv.accounting import audit
from tests.unit.kv.offload.segments import KEYS, spec_of
from tests.unit.kv.offload.site import Site
from tests.unit.kv.offload.watched_storage import Held, nothing

ONE, TWO, THREE, FOUR = (spec_of(number, tokens) for number, tokens in ((1, 60), (2, 50), (3, 64), (4, 40)))
ALL = (ONE, TWO, THREE, FOUR)


@pytest.fixture
def host():
    return HostTier(64 * PAGE)


def in_need(site: Site, spec: SegmentSpec) -> bool:
    """Have a segment in the pool; returns whether it had to be computed."""
    if site.store.get(spec) is not None:
        return False
    if site.residency.below(spec.key):
        site.bring_up(spec)
    if site.store.get(spec) is not None:
        return False
    site.compute(spec)
    return True


def hold_copies(site: Site) -> Held:
    """Hold back the copies from the pool, until they are released."""
    site.storage.before_read = held = Held()
    return held


def test_working_set_of_twice_the_pool_is_computed_once(host):
    site = Site([], tokens=128, host=host)
    computed = [in_need(site, spec) for _ in range(4) for spec in ALL]
    assert computed == [True] * 4 + [False] * 12
    for spec in ALL:
        in_need(site, spec)
        assert site.lies_right(spec)
    assert site.residency.loaded["host"] >= 12 * 40 / 2
    assert host.stats().writes == 4, "what came up from there goes without a copy"
    site.settled()
    audit(site.store)
    site.close()


def test_nothing_is_copied_while_the_pool_has_space(host):
    site = Site([], tokens=512, host=host)
    for spec in ALL:
        site.compute(spec)
        site.residency.demote()
    site.settled()
    assert host.stats().writes == 0
    site.close()


def test_whole_segment_is_copied_before_its_end_is_evicted(host):
    site = Site([], tokens=64, host=host)
    site.compute(ONE)
    site.pool.free(site.allocate(16))
    (segment,) = site.store
    left = segment.tokens
    assert 0 < left < len(ONE.ids)
    assert host.holds(ONE.key)
    site.bring_up(ONE)
    assert site.lies_right(ONE)
    assert site.residency.loaded == {"host": len(ONE.ids) - left}
    site.close()


def test_segments_copied_ahead_are_evicted_at_once(host):
    """A decode step takes a chunk that is already copied, and waits for no copy."""
    site = Site([], tokens=256, host=host)
    for spec in (*ALL, spec_of(5, 42)):
        site.compute(spec)
    assert site.pool.free_chunks == 0
    site.residency.demote()
    site.settled()
    copied = host.stats().writes
    assert 0 < copied < 5
    site.pool.free(site.store.allocate(16, urgent=True))
    assert site.store.demotion.not_copied == 0
    site.pool.free(site.store.allocate(16))
    assert host.stats().writes == copied
    site.close()


def test_urgent_allocation_evicts_copied_segments_first(host):
    site = Site([], tokens=128, host=host)
    site.compute(ONE)
    site.compute(TWO)
    site.residency.demote()
    site.settled()
    assert (host.holds(ONE.key), host.holds(TWO.key)) == (True, False)
    site.store.get(ONE)  # TWO would be the next
    site.pool.free(site.store.allocate(16, urgent=True))
    assert site.store.get(TWO) is not None
    assert site.store.get(ONE) is None
    assert site.store.demotion.not_copied == 0
    hold_copies(site).go_on.set()
    site.pool.free(site.store.allocate(128, urgent=True))
    assert site.store.demotion.not_copied == 1, "it is lost, and nobody has waited"
    assert not site.residency.moving
    site.close()


def test_segment_is_kept_while_it_is_copied(host):
    site = Site([], tokens=128, host=host)
    site.compute(ONE)
    site.compute(TWO)
    slow = hold_copies(site)
    with pytest.raises(CapacityError):
        site.store.allocate(32)
    assert slow.reached.wait(10)
    assert site.residency.moving, "whoever needs the room is told to wait"
    held = site.store.longest(ONE).slots
    taken = site.store.allocate(64, urgent=True)  # urgent: TWO is evicted
    assert set(site.pool.chunks_of(taken)).isdisjoint(site.pool.chunks_of(held))
    slow.go_on.set()
    site.pool.free(site.allocate(32))
    site.pool.free(taken)
    site.bring_up(ONE)
    assert site.lies_right(ONE)
    site.settled()
    audit(site.store)
    site.close()


def test_urgent_allocation_evicts_a_segment_in_copy_last(host):
    """An urgent allocation takes the slots, and the interrupted copy is dropped."""
    site = Site([], tokens=64, host=host)
    site.compute(ONE)
    slow = hold_copies(site)
    with pytest.raises(CapacityError):
        site.store.allocate(16)
    assert slow.reached.wait(10)
    runs = site.store.allocate(64, urgent=True)
    for layer in range(2):
        site.storage.keys[layer].fill_(9.0)
    slow.go_on.set()
    site.settled()
    assert not host.holds(ONE.key)
    assert host.stats().segments == 0
    assert site.store.demotion.not_copied == 1
    site.pool.free(runs)
    audit(site.store)
    site.close()


def test_late_copy_keeps_its_slots(host):
    site = Site([], tokens=128, host=host, timeout_s=1e-9)
    site.compute(ONE)
    site.compute(TWO)
    slow = hold_copies(site)
    site.pool.free(site.store.allocate(32))
    (held,) = (segment for segment in site.store if segment.held)
    assert held.specs.keys() == {ONE.key}
    assert held.tokens == len(ONE.ids)
    slow.go_on.set()
    site.settled()
    audit(site.store)
    site.close()


def test_hanging_copy_has_the_timeout_of_a_read(host):
    site = Site([], tokens=128, host=host, timeout_s=0.05)
    site.compute(ONE)
    site.compute(TWO)
    slow = hold_copies(site)
    runs = site.allocate(32)
    assert not slow.go_on.is_set()
    assert site.store.get(TWO) is None or site.store.get(ONE) is None
    slow.go_on.set()
    site.pool.free(runs)
    site.settled()
    audit(site.store)
    site.close()


def test_eviction_works_with_very_slow_copies(monkeypatch):
    """The host tier drops the first copies meanwhile. Each chunk leaves the pool once its own copy is done."""
    monkeypatch.setattr("inlay.kv.offload.saver.OFFERED_S", 0.4)
    host = HostTier(2 * PAGE)
    site = Site([], tokens=512, host=host)
    for number in range(8):
        site.compute(spec_of(number + 1, 64))
    site.storage.before_read = lambda layer, slots: time.sleep(0.05)
    asked = 0
    while True:
        try:
            runs = site.store.allocate(512)
            break
        except CapacityError:
            asked += 1
            assert asked < 40
            site.residency.wait(10)
            site.residency.poll()
    assert host.stats().writes <= 9, "hardly any is copied twice"
    site.pool.free(runs)
    site.settled()
    audit(site.store)
    site.close()


def test_cancelled_copies_evict_nothing_further():
    host = HostTier(2 * PAGE)
    site = Site([], tokens=2048, host=host)
    specs = [spec_of(number, tokens) for number, tokens in enumerate((20, 20, 20, 60), 1)]
    for spec in specs[:2]:
        site.compute(spec)
    site.store.demotion.begin(list(site.store))
    site.settled()
    assert host.stats().segments == 2
    site.store.clear()
    for spec in specs[2:]:
        site.compute(spec)
    slow = hold_copies(site)
    site.store.demotion.begin(list(site.store))
    assert slow.reached.wait(10)
    site.store.demotion.give_up()
    slow.go_on.set()
    site.settled()
    assert host.stats().evictions == 1, "for the one that was being copied"
    site.close()


def test_evicted_segments_leave_no_specs_in_a_shared_prefix(host):
    """Modules with a common prefix come and go for years; the prefix stays."""
    site = Site([], tokens=128, host=host)
    for number in range(200):
        site.compute(specify((5, *range(1000 * number, 1000 * number + 30)), 0, (), KEYS))
    assert max(len(segment.specs) for segment in site.store) <= 4
    (last,) = (segment for segment in site.store if 199_000 in segment.run.ids)
    assert len(last.specs) == 1, "what is whole is known"
    site.settled()
    assert len(site.store.demotion.offered) <= 200
    audit(site.store)
    site.close()


def test_failed_copy_is_a_miss(host, caplog):
    site = Site([], tokens=64, host=host)
    site.compute(ONE)

    def fail(layer, slots):
        raise RuntimeError("the device is gone")

    site.storage.before_read = fail
    site.compute(TWO)
    site.storage.before_read = nothing
    assert "could not be copied" in caplog.text
    assert site.lies_right(TWO)
    assert not site.residency.below(ONE.key)
    assert host.stats().segments == 0
    assert in_need(site, ONE), "it is computed again"
    assert host.holds(TWO.key)
    audit(site.store)
    site.close()


def test_invalid_numbers_are_not_kept(host, caplog):
    site = Site([], tokens=64, host=host)
    site.compute(ONE)
    site.storage.keys[1][:, site.store.get(ONE).slots[0].first] = float("nan")
    site.compute(TWO)
    assert "no number" in caplog.text
    assert not host.holds(ONE.key)
    site.close()


def test_too_small_host_memory_does_not_block_requests():
    """A chunk that does not fit is evicted as without a host tier."""
    host = HostTier(1 * PAGE)
    site = Site([], tokens=128, host=host)
    for spec in (*ALL, spec_of(5, 100), *ALL):
        in_need(site, spec)
        assert site.lies_right(spec)
    assert host.stats().segments == 1
    site.close()


def test_copies_of_pooled_segments_are_evicted_first():
    """All four find a place in the two tiers, where the host tier alone has room for three of them."""
    host = HostTier(5 * PAGE)
    site = Site([], tokens=128, host=host)
    computed = 0
    for spec in ALL * 6:
        computed += in_need(site, spec)
        site.settled()  # else the next one may be needed while it is copied
        while any(kept.readers for kept in list(host.kept.values())):  # no copy is evicted while it has a reader
            time.sleep(0.001)
    assert computed == 4
    assert host.stats().evictions > 0
    site.close()


def test_segment_forgotten_while_copied_is_not_kept(host):
    site = Site([], tokens=64, host=host)
    site.compute(ONE)
    slow = hold_copies(site)
    with pytest.raises(CapacityError):
        site.store.allocate(32)
    assert slow.reached.wait(10)
    site.residency.forget(ONE.key)
    site.store.discard(list(site.store))
    assert len(site.store) == 0, "nothing holds it any more"
    site.pool.free(site.store.allocate(64))
    slow.go_on.set()
    site.settled()
    assert not host.holds(ONE.key)
    assert not site.residency.below(ONE.key)
    site.compute(ONE)
    site.compute(TWO)
    assert host.holds(ONE.key), "computed again, it is copied again"
    site.close()


def test_forgotten_prefix_of_another_module_is_not_copied(host):
    """The remaining tokens belong to the other module and are copied under its key."""
    site = Site([], tokens=128, host=host)
    short, long = (specify(tuple(range(7000, 7000 + tokens)), 0, (), KEYS) for tokens in (32, 70))
    site.compute(short)
    site.compute(long)
    site.store.forget_module(short)
    site.residency.forget(short.key)
    site.pool.free(site.allocate(128))
    assert (host.holds(short.key), host.holds(long.key)) == (False, True)
    site.close()


def test_forgotten_and_cleared_segments_leave_lower_tiers(host):
    site = Site([], tokens=64, host=host)
    for spec in (ONE, TWO, THREE):
        site.compute(spec)
    assert site.residency.holders(ONE.key) == ["host"]
    site.residency.forget(ONE.key)
    assert site.residency.holders(ONE.key) == []
    site.settled()
    assert not host.holds(ONE.key)
    site.residency.clear_host()
    assert not site.residency.below(TWO.key)
    site.close()


def test_clearing_a_tier_cancels_its_load(host):
    """A load in progress when its tier is cleared does not arrive."""
    site = Site([], tokens=64, host=host)
    for spec in (ONE, TWO, THREE):
        site.compute(spec)
    site.storage.before_put = held = Held()
    while not site.residency.bringing([ONE.key]):
        site.residency.bring_up([(ONE, site.store.longest(ONE))])
        site.residency.wait(0.05)
        site.residency.poll()
    assert site.residency.below(ONE.key)
    site.residency.clear_host()
    site.store.clear()
    assert not site.residency.below(ONE.key), "nobody waits for it"
    assert site.residency.why_missing(ONE) != "late"
    assert site.residency.bringing([ONE.key]), "its slots are taken until the reader is done"
    held.go_on.set()
    while site.residency.bringing([ONE.key]):
        site.residency.wait(10)
        site.residency.poll()
    assert len(site.store) == 0
    audit(site.store)
    site.compute(ONE)
    assert site.lies_right(ONE)
    site.close()


def test_split_segment_is_copied_whole(host):
    """The index splits where texts part; a module that begins with another is copied with that one's tokens."""
    site = Site([], tokens=128, host=host)
    long = spec_of(7, 70)
    other = specify((*long.ids[:30], *range(90_000, 90_020)), 0, (), KEYS)
    site.compute(long)
    site.compute(other)
    assert len(site.store) == 3
    site.pool.free(site.allocate(128))
    assert host.holds(long.key)
    assert host.holds(other.key)
    site.bring_up(long)
    assert site.lies_right(long)
    site.close()


def test_lookups_for_copies_change_no_eviction_order(host):
    """Copying ahead does not change the eviction order."""
    site = Site([], tokens=128, host=host)
    site.compute(ONE)
    site.compute(TWO)
    before = [segment.specs.keys() for segment in site.store.next_to_go(8)]
    site.residency.demote()
    site.settled()
    assert [segment.specs.keys() for segment in site.store.next_to_go(8)] == before
    site.close()


def test_device_host_disk(host, tmp_path):
    """Computed, it is written to disk; evicted, it goes to the host as well; read from the nearest that gives it."""
    disk = DiskTier(tmp_path, 1 << 30)
    site = Site([disk], tokens=128, host=host)
    site.compute(ONE)
    site.written()
    assert (host.holds(ONE.key), disk.holds(ONE.key)) == (False, True)
    site.pool.free(site.allocate(128))
    assert host.holds(ONE.key)
    site.bring_up(ONE)
    assert (site.lies_right(ONE), site.residency.came_from(ONE.key)) == (True, "host")
    site.store.clear()
    kept = host.kept[ONE.key]
    host.memory.read(kept.pages, 5, 1)[0] ^= 1
    site.bring_up(ONE)
    assert (site.lies_right(ONE), site.residency.came_from(ONE.key)) == (True, "disk"), (
        "where one fails, the next gives"
    )
    site.settled()
    assert not host.holds(ONE.key), "what the disk gave is in the pool; it goes to the host when it leaves that"
    site.pool.free(site.allocate(128))
    assert host.holds(ONE.key)
    audit(site.store)
    site.close()


def test_host_tier_is_read_while_the_disk_hangs(host, tmp_path):
    disk, go_on = DiskTier(tmp_path, 1 << 30), threading.Event()
    site = Site([disk], tokens=256, host=host, timeout_s=0.05)
    site.compute(ONE)
    site.written()
    site.store.clear()
    site.compute(TWO)
    site.compute(THREE)
    site.written()
    site.pool.free(site.allocate(256))
    assert [host.holds(spec.key) for spec in (ONE, TWO, THREE)] == [False, True, True]
    get = disk.get
    disk.get = lambda *asked: (go_on.wait(30), get(*asked))
    assert site.residency.bring_up([(ONE, site.store.longest(ONE))]) is Coming.ON_ITS_WAY
    while site.residency.moving:
        site.residency.wait(0.01)
        site.residency.poll()
    assert not site.residency.below(ONE.key), "it is late, and is computed"
    assert site.residency.below(TWO.key)
    site.bring_up(TWO)
    assert site.lies_right(TWO)
    go_on.set()
    while site.residency.bringing([ONE.key]):
        site.residency.wait(10)
        site.residency.poll()
    audit(site.store)
    site.close()


def test_host_segments_are_computed_if_loaded_with_a_hanging_disk(host, tmp_path):
    disk, go_on = DiskTier(tmp_path, 1 << 30), threading.Event()
    site = Site([disk], tokens=256, host=host, timeout_s=0.05)
    site.compute(ONE)
    site.written()
    site.store.clear()
    site.compute(TWO)
    site.written()
    site.pool.free(site.allocate(256))
    assert [host.holds(spec.key) for spec in (ONE, TWO)] == [False, True]
    get = disk.get
    disk.get = lambda *asked: (go_on.wait(30), get(*asked))
    assert site.residency.bring_up([(spec, site.store.longest(spec)) for spec in (ONE, TWO)]) is Coming.ON_ITS_WAY
    while site.residency.moving:
        site.residency.wait(0.01)
        site.residency.poll()
    assert not any(site.residency.below(spec.key) for spec in (ONE, TWO))
    go_on.set()
    while site.residency.bringing([ONE.key]):
        site.residency.wait(10)
        site.residency.poll()
    audit(site.store)
    site.close()


def test_restart_reads_from_disk(tmp_path):
    for number in range(2):
        host, disk = HostTier(64 * PAGE), DiskTier(tmp_path, 1 << 30)
        site = Site([disk], tokens=128, host=host)
        for spec in ALL:
            assert in_need(site, spec) == (number == 0)
            site.written()
        assert all(in_need(site, spec) or site.lies_right(spec) for spec in ALL)
        site.settled()
        site.close()


def test_lossy_segment_is_copied_to_the_host_unchanged(host, tmp_path):
    disk = DiskTier(tmp_path, 1 << 30, "int8")
    site = Site([disk], tokens=128, host=host)
    site.compute(ONE)
    site.written()
    site.store.clear()
    form = site.form(ONE, "int8")
    site.bring_up(form)
    site.pool.free(site.allocate(128))
    assert host.holds(form.key)
    assert not host.holds(ONE.key)
    site.bring_up(form)
    assert (site.lies_right(form), site.residency.came_from(form.key)) == (True, "host")
    site.close()


def test_held_segments_are_neither_copied_nor_evicted(host):
    site = Site([], tokens=128, host=host)
    site.compute(ONE)
    site.compute(TWO)
    found: PrefixMatch = site.store.longest(ONE)
    with site.store.hold(found), pytest.raises(CapacityError):
        site.allocate(128)
    assert site.lies_right(ONE)
    site.close()
