"""Log-probabilities in arrays that read as lists."""

from __future__ import annotations

import pickle
import sys
import tracemalloc

import pytest

from inlay.logprobs import FlatLogprobs, Logprob

RANKED = [[(65, -0.5, 1), (66, -1.0, 2)], [(67, -2.0, 3), (65, -0.25, 1), (66, -0.75, 2)], [(66, -0.125, 1)]]
TEXTS = {65: "A", 66: "B", 67: "C"}
ENTRIES = [{token: Logprob(logprob, rank, TEXTS[token]) for token, logprob, rank in entry} for entry in RANKED]


def test_flat_logprobs_equal_a_list():
    flat = FlatLogprobs(RANKED, TEXTS)
    assert flat == ENTRIES
    assert list(flat) == ENTRIES
    assert (flat[0], flat[-1], flat[1:], flat[:0]) == (ENTRIES[0], ENTRIES[-1], ENTRIES[1:], [])
    assert repr(flat) == repr(ENTRIES)
    assert flat != ENTRIES[:2]
    assert flat != [*ENTRIES[:2], ENTRIES[0]]
    assert flat != 3
    with pytest.raises(IndexError):
        flat[3]
    assert [list(entry) for entry in flat] == [[65, 66], [67, 65, 66], [66]], "the token itself comes first"


def test_entries_without_values_are_none():
    flat = FlatLogprobs([None, *RANKED])
    assert list(flat.ranked()) == [None, *RANKED]
    assert flat[0] is None
    assert flat[1] == {65: Logprob(-0.5, 1), 66: Logprob(-1.0, 2)}
    assert flat.so_far(TEXTS) == [None, *ENTRIES]


def test_snapshot_is_unchanged_by_later_entries():
    flat = FlatLogprobs(RANKED[:1], TEXTS)
    taken = flat.so_far()
    flat.append(RANKED[1])
    assert (len(taken), len(flat)) == (1, 2)
    assert taken == ENTRIES[:1]
    assert flat.so_far() == ENTRIES[:2]
    assert taken[-1] == ENTRIES[0]


def test_flat_logprobs_are_pickled_as_a_list():
    written = pickle.loads(pickle.dumps(FlatLogprobs(RANKED, TEXTS)))
    assert type(written) is list
    assert written == ENTRIES


def test_a_number_takes_some_twenty_bytes():
    """Dictionaries of objects take 250 bytes, and their remains keep memory from the system."""
    entry = [(token, -token / 7, token) for token in range(1000, 1021)]
    tracemalloc.start()
    blocks = sys.getallocatedblocks()
    try:
        flat = FlatLogprobs(entry for _ in range(2000))
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(flat) == 2000
    assert size < 24 * 21 * 2000
    assert sys.getallocatedblocks() - blocks < 1000
