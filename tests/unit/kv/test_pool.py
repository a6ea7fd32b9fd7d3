"""The pool hands out each slot once, prefers runs, and takes a chunk back from the last of its owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import CapacityError
from inlay.kv.pool import KVPool
from inlay.slots import SlotRange, cut
from tests.raising import raises


def pool(chunks: int = 8, chunk_size: int = 4) -> KVPool:
    return KVPool(chunks * chunk_size * 16, 16, chunk_size)


def test_chunks_are_allocated_side_by_side():
    assert pool().allocate(9) == (SlotRange(0, 12),)


def test_range_is_extended_if_the_next_chunk_is_free():
    p = pool()
    (first,) = p.allocate(4)
    assert p.allocate(4, after=first) == (SlotRange(4, 4),)


def test_scattered_chunks_are_used_without_a_long_range():
    p = pool(4)
    held = [p.allocate(4) for _ in range(4)]
    p.free(held[0])
    p.free(held[2])
    assert p.allocate(8) == (SlotRange(0, 4), SlotRange(8, 4))


def test_full_pool_returns_none():
    p = pool(2)
    assert p.allocate(9) is None
    assert p.free_chunks == 2


def test_double_free_is_detected():
    p = pool()
    runs = p.allocate(4)
    p.free(runs)
    with pytest.raises(AssertionError, match="freed twice"):
        p.free(runs)


def test_pool_smaller_than_one_chunk_is_rejected():
    with raises("cache.pool_too_small", CapacityError, names="64"):
        KVPool(63, 16, 4)


def test_chunk_is_free_after_its_last_owner_released_it():
    p = pool()
    runs = p.allocate(8)
    p.share((SlotRange(2, 3),))  # in both chunks
    p.share((SlotRange(5, 1),))  # in the second
    assert [p.owners(chunk) for chunk in range(3)] == [2, 3, 0]
    p.free(runs)
    assert p.free_chunks == 6
    p.free((SlotRange(2, 3),))
    assert p.free_chunks == 7
    p.free((SlotRange(5, 1),))
    assert p.free_chunks == 8
    with pytest.raises(AssertionError, match="a free chunk cannot be shared"):
        p.share(runs)


def test_owner_with_several_ranges_in_a_chunk_counts_once():
    p = pool()
    p.allocate(4)
    p.share((SlotRange(0, 1), SlotRange(2, 2)))
    assert p.owners(0) == 2
    assert p.chunks_of((SlotRange(0, 1), SlotRange(2, 2), SlotRange(7, 0))) == [0]


def test_peak_is_the_most_ever_allocated():
    p = pool()
    first = p.allocate(9)
    p.free(first)
    p.allocate(4)
    assert p.peak_chunks == 3


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "free"]), st.integers(0, 999)), max_size=60))
def test_owners_are_counted(steps):
    """Compared with a plain list of the owners of each chunk."""
    p, owned = pool(6), []
    for what, number in steps:
        if what == "take":
            runs = p.allocate(1 + number % 13)
            owned += [runs] if runs else []
        elif owned and what == "share":
            runs = owned[number % len(owned)]
            part = cut(runs, number % sum(run.length for run in runs), 1)
            p.share(part)
            owned.append(part)
        elif owned:
            p.free(owned.pop(number % len(owned)))
        chunks = [chunk for runs in owned for chunk in {s // 4 for run in runs for s in range(run.first, run.end)}]
        assert [p.owners(chunk) for chunk in range(6)] == [chunks.count(chunk) for chunk in range(6)]
        assert p.free_chunks == 6 - len(set(chunks))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=60))
def test_no_slot_is_allocated_twice_and_none_is_lost(steps):
    p, held = pool(16), []
    for take, size in steps:
        if take:
            runs = p.allocate(size)
            if runs is not None:
                held.append(runs)
                assert sum(run.length for run in runs) >= size
        elif held:
            p.free(held.pop(size % len(held)))
        slots = [slot for runs in held for run in runs for slot in range(run.first, run.end)]
        assert len(slots) == len(set(slots))
        assert len(slots) + p.free_tokens == 64


def test_cut():
    assert cut((SlotRange(0, 4), SlotRange(8, 4)), 2, 4) == (SlotRange(2, 2), SlotRange(8, 2))
    assert cut((SlotRange(0, 4), SlotRange(8, 4)), 4, 1) == (SlotRange(8, 1),)
    assert cut((SlotRange(0, 4),), 1, 0) == ()
