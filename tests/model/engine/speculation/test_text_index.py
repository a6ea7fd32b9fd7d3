"""Lookups in texts, against a search that compares everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.text_index import MOST_INDEXED, MOST_MATCH, DraftIndex, GrowingIndex

TOKENS = st.lists(st.sampled_from([1, 2, 3, 2**21 + 1, 2**22 - 1]), max_size=60)


def agreeing(ids: list[int], place: int, text: list[int]) -> int:
    length = 0
    while length < min(place, len(text), MOST_MATCH) and ids[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


@given(TOKENS, TOKENS)
def test_the_longest_match_is_found(ids, text):
    found = DraftIndex(ids).find(GrowingIndex(text))
    lengths = {place: agreeing(ids, place, text) for place in range(1, len(ids))}
    known = [place for place, length in lengths.items() if length >= 3][-8:]
    if not known:
        assert found is None
        return
    assert found is not None
    assert found.length == lengths[found.place] == max(lengths[place] for place in known)


@given(TOKENS)
def test_a_growing_text_finds_its_last_match(ids):
    whole = GrowingIndex(ids)
    piecewise = GrowingIndex(ids[:2])
    for token in ids[2:]:
        piecewise.extend([token])
    found = whole.find()
    assert found == piecewise.find()
    places = [place for place in range(1, len(ids)) if agreeing(ids, place, ids) >= 3]
    # The key of the last three tokens may be shared with other tokens beyond 21 bits.
    if found is not None:
        assert found == (places[-1], agreeing(ids, places[-1], ids))
    elif places:
        assert max(ids) >= 2**21


def test_match_at_the_end_of_a_text_is_not_used():
    assert DraftIndex([1, 2, 3]).find(GrowingIndex([1, 2, 3])) is None
    assert DraftIndex([1, 2, 3, 4]).find(GrowingIndex([1, 2, 3])) == (3, 3)
    assert GrowingIndex([1, 2, 3]).find() is None


def test_a_long_text_is_indexed_at_its_end():
    index = DraftIndex(range(90 + MOST_INDEXED))
    assert index.find(GrowingIndex([91, 92, 93])) == (94, 3)
    assert index.find(GrowingIndex([89, 90, 91, 92, 93])) == (94, 5)
    assert index.find(GrowingIndex([89, 90, 91])) is None
