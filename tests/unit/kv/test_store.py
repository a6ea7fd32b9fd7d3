"""The store verifies, evicts segments without references, keeps the others, and loses no chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import CapacityError
from inlay.kv.identity import Context, KeyMaker, SegmentSpec, TokenRun, specify
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange
from tests.raising import raises
from tests.unit.kv.accounting import audit

KEYS = KeyMaker(b"model", "float32", "none", b"", positioned=False)


def store(chunks: int = 4) -> SegmentStore:
    return SegmentStore(KVPool(chunks * 4 * 16, 16, 4), KEYS)


def spec(seed: int, length: int = 4) -> SegmentSpec:
    return specify(tuple(range(seed, seed + length)), 0, (), KEYS)


def put(s: SegmentStore, wanted: SegmentSpec) -> None:
    """Store it in slots of its own."""
    slots = s.allocate(len(wanted.ids))
    s.insert(wanted, slots)
    s.pool.free(slots)


def test_inserted_segment_is_found():
    s = store()
    put(s, spec(1))
    found = s.get(spec(1))
    assert [segment.run.ids for segment in found.segments] == [(1, 2, 3, 4)]
    assert s.get(spec(2)) is None
    assert s.get(spec(1, 5)) is None  # a prefix is not the whole
    assert s.get(spec(1, 3)).tokens == 3
    assert (len(s), s.tokens) == (1, 4)


def test_token_ids_are_compared_on_every_hit():
    """Two texts at one place under one first token (a broken hash, a forged store) are a hit as far as they agree."""
    s = store()
    put(s, spec(1))
    (segment,) = s
    segment.run = TokenRun((1, 2, 9, 4), 0, Context())
    assert s.get(spec(1)) is None
    assert s.longest(spec(1)).tokens == 2


def test_segment_in_another_context_is_not_found():
    s = store()
    head = spec(1)
    put(s, head)
    put(s, specify((7, 8), 4, (head,), KEYS))
    assert s.get(specify((7, 8), 4, (head,), KEYS)) is not None
    assert s.get(specify((7, 8), 5, (head,), KEYS)) is None  # a gap
    assert s.get(specify((7, 8), 4, (spec(2),), KEYS)) is None
    assert s.get(specify((7, 8), 0, (), KEYS)) is None


def test_segment_of_another_salt_is_not_found():
    s = store()
    put(s, spec(1))
    other = SegmentStore(s.pool, KeyMaker(b"model", "float32", "none", b"tenant", positioned=False))
    assert other.place(spec(1)) != s.place(spec(1))


def test_least_recently_used_is_evicted_first():
    s = store(2)
    put(s, spec(1))
    put(s, spec(11))
    s.get(spec(1))
    put(s, spec(21))
    assert s.get(spec(1)) is not None
    assert s.get(spec(11)) is None


def test_held_segments_stay():
    s = store(1)
    put(s, spec(1))
    with s.hold(s.get(spec(1))) as hold:
        with raises("engine.kv_memory", CapacityError):
            s.allocate(4)
        s.clear()
        audit(s, holds=[hold])
        assert s.get(spec(1)) is not None
    s.allocate(4)
    assert s.get(spec(1)) is None


def test_two_references_to_a_segment_are_independent():
    s = store(1)
    put(s, spec(1))
    one, other = s.hold(s.get(spec(1)), s.get(spec(1))), s.hold(s.get(spec(1)))
    one.release()
    s.clear()
    assert len(s) == 1
    other.release()
    s.clear()
    assert len(s) == 0
    audit(s)


def test_impossible_allocation_evicts_nothing():
    s = store(2)
    put(s, spec(1))
    with pytest.raises(CapacityError):
        s.allocate(100)
    assert s.get(spec(1)) is not None


def test_segment_in_a_shared_chunk_is_not_evicted():
    """Its going would free nothing: the oldest one shares a chunk with a held one, the next has one of its own."""
    s = store(2)
    block = s.allocate(4)
    s.insert(spec(1, 2), block[:1])
    s.insert(spec(11, 2), [type(block[0])(block[0].first + 2, 2)])
    s.pool.free(block)
    put(s, spec(21))
    with s.hold(s.get(spec(11, 2))):
        s.allocate(4)
    assert s.get(spec(1, 2)) is not None
    assert s.get(spec(21)) is None


def test_segment_loses_no_more_tokens_than_needed():
    s = store(4)
    put(s, spec(1, 14))
    s.allocate(4)
    assert s.get(spec(1, 12)) is not None
    assert s.get(spec(1, 13)) is None
    assert (len(s), s.tokens, s.pool.free_chunks) == (1, 12, 0)


def test_end_of_the_least_recently_used_is_evicted_first():
    s = store(6)
    put(s, spec(1, 12))
    put(s, spec(101, 12))
    s.get(spec(1, 12))
    s.allocate(8)
    assert (s.longest(spec(1, 12)).tokens, s.longest(spec(101, 12)).tokens) == (12, 4)


def test_hold_covers_only_the_read_tokens():
    s = store(4)
    put(s, spec(1, 16))
    with s.hold(s.longest(spec(1, 16), most=5)) as hold:
        assert [s.pool.chunks_of(slots) for slots in hold.slots()] == [[0, 1]]
        block = s.allocate(8)
        audit(s, holds=[hold], blocks=[block])
        with pytest.raises(CapacityError):
            s.allocate(1)
        assert s.longest(spec(1, 16)).tokens == 8
        s.clear()
        assert s.longest(spec(1, 16)).tokens == 5
        audit(s, holds=[hold], blocks=[block])
    s.clear()
    assert s.tokens == 0


def test_discard_keeps_held_tokens():
    s = store(4)
    put(s, spec(1, 16))
    (segment,) = s
    with s.hold(s.longest(spec(1, 16), most=5)) as hold:
        s.discard([segment])
        assert (s.tokens, s.pool.free_chunks) == (5, 2)
        audit(s, holds=[hold])


def test_small_segments_in_one_chunk_are_evicted_together():
    s = store(2)
    block = s.allocate(4)
    for n in range(2):
        s.insert(spec(1 + 10 * n, 2), [type(block[0])(block[0].first + 2 * n, 2)])
    s.pool.free(block)
    put(s, spec(101))
    s.get(spec(101))
    s.allocate(4)
    assert (s.get(spec(1, 2)), s.get(spec(11, 2))) == (None, None)
    assert s.get(spec(101)) is not None


def test_neighbouring_chunks_are_evicted_together():
    s = store(256)
    for chunk in range(256):
        put(s, spec(chunk * 10))
    lies = {segment.slots[0].first // 4: segment for segment in s}
    soon = [*range(0, 160, 10), *range(200, 216)]  # unused for longest: some far from each other, and some side by side
    for chunk in set(range(256)) - set(soon):
        s.get(spec(lies[chunk].run.ids[0]))
    assert len(s.allocate(8 * 4)) == 1
    assert s.pool.free_ranges == (SlotRange(208, 8),), "a few more than are needed"
    assert len(s) == 256 - 16


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 19), st.integers(0, 19), st.integers(1, 5)), max_size=30),
)
def test_held_segments_are_found_after_any_eviction(steps):
    s = store(12)
    holds = []
    for seed, length, held, wanted in steps:
        try:
            put(s, spec(seed * 100, length))
        except CapacityError:
            continue
        if held:
            found = s.longest(spec(seed * 100, length), most=held)
            holds.append((s.hold(found), spec(seed * 100, length), found.tokens))
        if len(holds) > 2:
            holds.pop(0)[0].release()
        before = s.pool.free_chunks
        try:
            blocks = s.allocate(wanted * 4)
        except CapacityError:
            assert s.pool.free_chunks == before
        else:
            assert s.pool.free_chunks == max(0, before - wanted), "as many chunks went as were needed"
            s.pool.free(blocks)
        audit(s, holds=[hold for hold, _, _ in holds])
        for _, each, tokens in holds:
            assert s.longest(each).tokens >= tokens


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10), st.booleans()), max_size=50))
def test_chunks_are_accounted_for(steps):
    s = store(5)
    for seed, length, clear in steps:
        if clear:
            s.clear()
            assert s.pool.free_chunks == 5
        else:
            put(s, spec(seed * 100, length))
            assert s.get(spec(seed * 100, length)) is not None
        audit(s)


def store_text(s: SegmentStore, ids: tuple[int, ...]) -> TokenRun:
    """Store text that is no module, from its first token on."""
    run, slots = TokenRun(ids, 0, Context()), s.allocate(len(ids))
    s.insert(run, slots)
    s.pool.free(slots)
    return run


def stored(s: SegmentStore) -> set[tuple[int, ...]]:
    return {segment.run.ids for segment in s}


def test_module_is_discarded_with_text_after_it():
    s = store(16)
    put(s, spec(1))
    store_text(s, (1, 2, 3, 4, 9, 9))
    store_text(s, (1, 2, 3, 4, 8, 8))
    s.discard(s.own_ends(spec(1)))
    assert stored(s) == set()
    audit(s)


def test_module_that_is_a_prefix_of_text_is_discarded():
    """An earlier request had the same text before it became a module, so it is one node with that request's text."""
    s = store(16)
    store_text(s, (1, 2, 3, 4, 9, 9))
    assert s.get(spec(1)) is not None
    s.discard(s.own_ends(spec(1)))
    assert s.get(spec(1)) is None
    audit(s)


def test_other_text_with_a_common_prefix_stays():
    s = store(16)
    other = store_text(s, (1, 2, 7, 7, 7))
    put(s, spec(1, 6))
    store_text(s, (1, 2, 3, 4, 5, 6, 9))
    s.discard(s.own_ends(spec(1, 6)))
    assert s.longest(other).tokens == 5
    assert s.longest(spec(1, 6)).tokens == 2
    assert s.own_ends(spec(1, 6)) == []  # the rest belongs to the other text
    audit(s)


def test_module_that_is_a_prefix_of_another_stays():
    s = store(16)
    put(s, spec(1, 6))
    assert s.own_ends(spec(1, 4)) == []
    put(s, specify((1, 2, 3, 4, 9), 0, (), KEYS))  # cuts it in two
    assert s.own_ends(spec(1, 4)) == []
    s.discard(s.own_ends(spec(1, 6)))
    assert s.longest(spec(1, 6)).tokens == 4
    audit(s)
