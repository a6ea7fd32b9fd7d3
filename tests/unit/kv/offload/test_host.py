"""The host tier returns its contents unchanged, or nothing, and keeps within its memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from inlay.kv.offload.host import PAGE, HostMemory, HostTier, checksum
from inlay.kv.offload.tier import Miss, TierMissError
from inlay.kv.policies import POLICIES
from tests.unit.kv.offload.segments import KEYS, read, record_of, same, slabs_of, spec_of

ONE, TWO, THREE, LONG = (spec_of(number, tokens) for number, tokens in ((1, 40), (2, 50), (3, 30), (4, 200)))
FOUR, WHOLE = spec_of(6, 40), spec_of(9, 120)  # of one page, and of three


def filled(*specs, pages: int = 64, **settings) -> HostTier:
    tier = HostTier(pages * PAGE, **settings)
    for spec in specs:
        assert tier.put(record_of(spec), slabs_of(spec))
    return tier


def test_stored_segment_is_returned_unchanged():
    tier = filled(ONE, TWO, LONG)
    for spec in (LONG, ONE, TWO):
        assert tier.holds(spec.key)
        assert same(read(tier, record_of(spec)), slabs_of(spec))
    stats = tier.stats()
    assert (stats.segments, stats.tokens, stats.hits, stats.hit_tokens, stats.writes) == (3, 290, 3, 290, 3)
    assert stats.bytes == PAGE * (1 + 1 + 4) <= stats.quota == 64 * PAGE
    tier.close()


def test_segment_in_pieces_equals_the_whole():
    """Where no run of pages is long enough, slabs lie in several."""
    small = [spec_of(number, 40) for number in range(10, 16)]
    tier = filled(*small, pages=6)
    for spec in small[::2]:
        tier.delete(spec.key)
    wide = spec_of(5, 130)
    assert tier.put(record_of(wide), slabs_of(wide))
    assert same(read(tier, record_of(wide)), slabs_of(wide))
    assert all(same(read(tier, record_of(spec)), slabs_of(spec)) for spec in small[1::2])


def test_forms_and_slabs_are_kept_unchanged():
    """A form that has passed through a codec is not encoded again."""
    tier = HostTier(8 * PAGE)
    form = ONE.through("int8", KEYS)
    slabs = slabs_of(TWO)[:0] + [slab + 1 for slab in slabs_of(ONE)]
    assert tier.put(record_of(form), slabs)
    assert same(read(tier, record_of(form)), slabs)
    assert not tier.holds(ONE.key)


@pytest.mark.parametrize("layer", [0, 1])
def test_corrupt_byte_is_a_miss(layer, caplog):
    tier = filled(ONE, TWO)
    kept = tier.kept[ONE.key]
    size = slabs_of(ONE)[0].size
    tier.memory.read(kept.pages, layer * size + 7, 1)[0] ^= 4
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(ONE))
    assert miss.value.reason is Miss.CORRUPT
    assert "checksum" in caplog.text
    assert not tier.holds(ONE.key), "it is not asked for again"
    assert same(read(tier, record_of(TWO)), slabs_of(TWO))
    assert tier.stats().misses == (("corrupt", 1),)


def test_segment_of_another_key_is_a_miss():
    tier = filled(ONE, TWO)
    tier.kept[ONE.key], tier.kept[TWO.key] = tier.kept[TWO.key], tier.kept[ONE.key]
    with pytest.raises(TierMissError):
        read(tier, record_of(ONE))


def test_missing_and_late_segments_are_misses():
    tier = filled(ONE)
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(TWO))
    assert miss.value.reason is Miss.ABSENT
    with pytest.raises(TierMissError) as miss:
        tier.get(record_of(ONE), lambda layer, slab: None, lambda: True)
    assert miss.value.reason is Miss.LATE
    assert tier.holds(ONE.key), "it may be in time the next time"


def test_memory_is_bounded_and_the_policy_chooses_evictions():
    tier = filled(ONE, TWO, THREE, pages=3, policy=POLICIES["lfu"])
    read(tier, record_of(ONE))
    read(tier, record_of(THREE))
    four = spec_of(6, 40)
    assert tier.put(record_of(four), slabs_of(four))
    assert [tier.holds(spec.key) for spec in (ONE, TWO, THREE, four)] == [True, False, True, True]
    assert tier.stats().evictions == 1
    assert tier.stats().bytes == tier.quota
    assert not tier.fits(record_of(LONG))
    assert not tier.put(record_of(LONG), slabs_of(LONG))
    assert tier.stats().refused == 1
    assert tier.stats().segments == 3, "nothing goes for what never fits"


def test_uses_in_the_pool_count():
    tier = HostTier(2 * PAGE, POLICIES["lfu"])
    tier.put(record_of(ONE), slabs_of(ONE), 5)
    tier.put(record_of(TWO), slabs_of(TWO))
    tier.put(record_of(THREE), slabs_of(THREE))
    assert [tier.holds(spec.key) for spec in (ONE, TWO, THREE)] == [True, False, True]


def test_segment_in_the_pool_is_evicted_first():
    tier = filled(ONE, TWO, THREE, pages=3, policy=POLICIES["lfu"])
    for _ in range(3):
        read(tier, record_of(TWO))
    tier.note_above(TWO.key, True)
    four, five = spec_of(6, 40), spec_of(7, 40)
    tier.put(record_of(four), slabs_of(four))
    assert [tier.holds(spec.key) for spec in (ONE, TWO, THREE, four)] == [True, False, True, True]
    tier.note_above(THREE.key, True)
    tier.note_above(THREE.key, False)
    tier.put(record_of(five), slabs_of(five))
    assert [tier.holds(spec.key) for spec in (ONE, THREE)] == [False, True]


def test_segment_keeps_its_pages_while_it_is_read():
    """Deleted or evicted meanwhile, it is found no more, and nothing is written over it."""
    tier = filled(ONE, pages=2)
    reading, go_on, taken = threading.Event(), threading.Event(), []

    def take(layer, slab):
        reading.set()
        assert go_on.wait(10)
        taken.append(slab.copy())

    thread = threading.Thread(target=lambda: tier.get(record_of(ONE), take, lambda: False))
    thread.start()
    assert reading.wait(10)
    tier.delete(ONE.key)
    assert tier.put(record_of(TWO), slabs_of(TWO))
    assert not tier.put(record_of(spec_of(9, 60)), slabs_of(spec_of(9, 60))), "two pages are left to neither"
    go_on.set()
    thread.join()
    assert same(taken, slabs_of(ONE))
    assert tier.memory.free_bytes == tier.quota - tier.stats().bytes


@pytest.mark.parametrize("above", [False, True])
def test_rejected_segment_evicts_nothing_while_others_are_read(above):
    tier = filled(ONE, TWO, THREE, pages=3)
    tier.note_above(ONE.key, above)
    with tier.reading(record_of(ONE)):
        assert not tier.put(record_of(WHOLE), slabs_of(WHOLE))
        assert [tier.holds(spec.key) for spec in (ONE, TWO, THREE)] == [True, True, True]
        assert (tier.stats().refused, tier.stats().evictions) == (1, 0)
        assert tier.put(record_of(FOUR), slabs_of(FOUR)), "what is not read goes"
        assert [tier.holds(spec.key) for spec in (ONE, TWO, THREE)] == [True, False, True]
        tier.delete(ONE.key)
    assert tier.put(record_of(WHOLE), slabs_of(WHOLE))
    assert tier.memory.free_bytes == tier.quota - tier.stats().bytes


def test_failed_copy_leaves_nothing():
    tier = HostTier(4 * PAGE)

    def slabs():
        yield slabs_of(ONE)[0]
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="gone"):
        tier.put(record_of(ONE), slabs())
    assert not tier.holds(ONE.key)
    assert tier.memory.free_bytes == tier.quota


def test_many_threads_leak_no_page():
    tier = HostTier(6 * PAGE)
    specs = [spec_of(number, 30 + number) for number in range(20, 32)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(150):
            spec = specs[random.integers(len(specs))]
            what = random.integers(4)
            if what == 0:
                tier.put(record_of(spec), slabs_of(spec))
            elif what == 1:
                tier.delete(spec.key)
            elif what == 2:
                tier.note_above(spec.key, bool(random.integers(2)))
            else:
                try:
                    if not same(read(tier, record_of(spec)), slabs_of(spec)):
                        wrong.append(spec)
                except TierMissError as miss:
                    if miss.reason is not Miss.ABSENT:
                        wrong.append(miss)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.memory.free_bytes == tier.quota - tier.stats().bytes
    assert set(tier.above) <= set(tier.kept) == {entry.key for entry in tier.iterate()}
    tier.clear()
    assert tier.memory.free_bytes == tier.quota


def test_checksum_detects_every_changed_byte_and_swap():
    random = np.random.default_rng(0)
    for size in (1, 8, 8191, 8192, 40_003):
        data = random.integers(0, 256, size, np.uint8)
        before = checksum(data)
        for at in {0, size // 2, size - 1}:
            data[at] ^= 1
            assert checksum(data) != before
            data[at] ^= 1
        assert checksum(data) == before
    for one, other in ((0, 8), (0, 8192), (8, 8200), (0, 16_392), (32_768, 39_992)):
        swapped = data.copy()
        swapped[one : one + 8], swapped[other : other + 8] = data[other : other + 8], data[one : one + 8]
        assert checksum(swapped) != before, (one, other)
    torn = data.copy()
    torn[20_000:] = random.integers(0, 256, len(data) - 20_000, np.uint8)
    assert checksum(torn) != before


def test_memory_is_locked_once_and_released():
    told = []

    def lock(block):
        told.append(len(block))
        return lambda: told.append("let go")

    memory = HostMemory(3 * PAGE, lock)
    memory.close()
    memory.close()
    assert told == [3 * PAGE, "let go"]
