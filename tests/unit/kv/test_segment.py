"""Stored segments: matched parts, ranges, and references."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inlay.kv.identity import Context, KeyMaker, TokenRun
from inlay.kv.policies import Use
from inlay.kv.pool import Hold, PrefixMatch, Segment, SegmentRange
from inlay.slots import SlotRange

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)


def segment(first: int) -> Segment:
    return Segment(TokenRun((1, 2), 0, Context()), b"", (SlotRange(first, 2),), KEYS, Use(2))


def test_released_hold_references_nothing():
    one, other = segment(0), segment(2)
    with Hold() as hold:
        for each in (one, other, one):
            hold.add(each, 2)
        assert one.holds == other.holds == {hold}
    assert not one.holds
    assert not other.holds
    assert not hold.segments
    hold.release()  # a second time does nothing


@given(st.lists(st.integers(1, 5), max_size=5), st.integers(0, 26), st.integers(0, 26), st.integers(0, 9), st.data())
def test_any_part_of_a_match_has_its_slots_and_positions(lengths, first, end, start, data):
    """Against a list of all its tokens, each with its slot and the position that it was encoded at."""
    ranges, told, slot, position = [], [], 0, start
    for length in lengths:
        before = data.draw(st.integers(0, 2))  # the number of the segment's tokens that the part before it read
        tokens = before + length
        runs = [SlotRange(slot + 10 * n, 1) for n in range(tokens)]  # nowhere side by side
        one = Segment(TokenRun(tuple(range(tokens)), position - before, Context()), b"", tuple(runs), KEYS, Use(1))
        ranges.append(SegmentRange(one, before, tokens))
        told += [(run.first, position + n) for n, run in enumerate(runs[before:])]
        slot, position = slot + 10 * tokens, position + length
    part = PrefixMatch(tuple(ranges)).part(first, end)
    assert part.tokens == len(told[first:end])
    assert [slot for run in part.slots for slot in range(run.first, run.end)] == [slot for slot, _ in told[first:end]]
    positions = [each.start + n for each in part.ranges for n in range(each.tokens)]
    assert positions == [position for _, position in told[first:end]]
