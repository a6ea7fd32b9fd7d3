"""The pool hands out each slot once, and prefers runs."""

from __future__ import annotations

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.cache.pool import KVPool, LayerShape, Run, cut
from inlay.errors import CapacityError


def pool(chunks: int = 8, chunk_size: int = 4) -> KVPool:
    return KVPool([LayerShape(1, 2)], torch.float32, chunks * chunk_size * 16, chunk_size)


def test_whole_chunks_side_by_side():
    assert pool().allocate(9) == (Run(0, 12),)


def test_a_run_is_continued_where_the_next_chunk_is_free():
    p = pool()
    (first,) = p.allocate(4)
    assert p.allocate(4, after=first) == (Run(4, 4),)


def test_scattered_chunks_where_no_run_is_long_enough():
    p = pool(4)
    held = [p.allocate(4) for _ in range(4)]
    p.free(held[0])
    p.free(held[2])
    assert p.allocate(8) == (Run(0, 4), Run(8, 4))


def test_none_where_the_pool_is_full():
    p = pool(2)
    assert p.allocate(9) is None
    assert p.free_chunks == 2


def test_a_double_free_is_caught():
    p = pool()
    runs = p.allocate(4)
    p.free(runs)
    with pytest.raises(AssertionError, match="freed twice"):
        p.free(runs)


def test_too_small_for_one_chunk():
    with pytest.raises(CapacityError, match="holds no chunk of 4 tokens at 16 bytes a token; give at least 64"):
        KVPool([LayerShape(1, 2)], torch.float32, 63, 4)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=60))
def test_no_slot_is_given_out_twice_and_none_is_lost(steps):
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


def test_what_is_never_written_takes_no_memory():
    process = psutil.Process()
    before = process.memory_info().rss
    big = KVPool([LayerShape(8, 128)] * 4, torch.bfloat16, 2 * 2**30, 64)
    assert process.memory_info().rss - before < 2**27
    big.write(3, Run(64, 1), torch.ones(8, 1, 128), torch.ones(8, 1, 128))
    assert big.keys[3][:, 64].float().sum() == 8 * 128
    assert big.keys[2][:, 64].float().sum() == 0


def test_cut():
    assert cut((Run(0, 4), Run(8, 4)), 2, 4) == (Run(2, 2), Run(8, 2))
    assert cut((Run(0, 4), Run(8, 4)), 4, 1) == (Run(8, 1),)
    assert cut((Run(0, 4),), 1, 0) == ()
