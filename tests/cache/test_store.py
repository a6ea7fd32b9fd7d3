"""The store verifies, evicts what nobody needs, and loses no chunk."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.cache.pool import KVPool, LayerShape
from inlay.cache.segment import KeyMaker, SegmentSpec, specify
from inlay.cache.store import SegmentStore
from inlay.errors import CapacityError

KEYS = KeyMaker(b"model", "float32", "none", b"", positioned=False)


def store(chunks: int = 4) -> SegmentStore:
    return SegmentStore(KVPool([LayerShape(1, 2)], torch.float32, chunks * 4 * 16, 4))


def spec(seed: int, length: int = 4) -> SegmentSpec:
    return specify(tuple(range(seed, seed + length)), 0, (), KEYS)


def put(s: SegmentStore, wanted: SegmentSpec):
    return s.add(wanted, s.allocate(len(wanted.ids)))


def test_what_was_added_is_found():
    s = store()
    segment = put(s, spec(1))
    assert s.get(spec(1)) is segment
    assert s.get(spec(2)) is None
    assert (len(s), s.tokens) == (1, 4)


def test_token_ids_are_compared_on_every_hit(caplog):
    """Two texts with one key (a broken hash, a forged store) are no hit."""
    s = store()
    put(s, spec(1))
    forged = specify((7, 7), 0, (), KEYS)
    object.__setattr__(forged, "key", spec(1).key)
    with caplog.at_level(logging.WARNING):
        assert s.get(forged) is None
    assert "has the key of another text" in caplog.text


def test_the_least_recently_used_goes_first():
    s = store(2)
    put(s, spec(1))
    put(s, spec(2))
    s.get(spec(1))
    put(s, spec(3))
    assert s.get(spec(1)) is not None
    assert s.get(spec(2)) is None


def test_pinned_segments_stay():
    s = store(1)
    segment = put(s, spec(1))
    with s.pinned([segment]), pytest.raises(CapacityError, match="has room for 0 more tokens and 4 are needed"):
        s.allocate(4)
    assert s.get(spec(1)) is segment
    s.allocate(4)
    assert s.get(spec(1)) is None


def test_nothing_is_evicted_in_vain():
    s = store(2)
    put(s, spec(1))
    with pytest.raises(CapacityError):
        s.allocate(100)
    assert s.get(spec(1)) is not None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10), st.booleans()), max_size=50))
def test_chunks_are_accounted_for(steps):
    s = store(5)
    for seed, length, clear in steps:
        if clear:
            s.clear()
            assert s.pool.free_chunks == 5
        elif s.get(spec(seed * 100, length)) is None:
            put(s, spec(seed * 100, length))
        held = sum(s.pool.chunks_for(segment.tokens) for segment in s._segments.values())
        assert held + s.pool.free_chunks == 5
