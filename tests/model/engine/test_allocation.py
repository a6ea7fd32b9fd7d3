"""A plan's view of stored segments."""

from __future__ import annotations

from inlay.engine.allocation import pieces
from inlay.kv.identity import Context, KeyMaker, TokenRun
from inlay.kv.policies import Use
from inlay.kv.pool import PrefixMatch, Segment, SegmentRange
from inlay.slots import SlotRange

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)


def test_pieces_are_read_at_the_shift_of_each_segment():
    """Segments of one path may have been encoded at different positions."""
    one = Segment(TokenRun((1, 2, 3), 0, Context()), b"", (SlotRange(8, 2), SlotRange(20, 1)), KEYS, Use(1))
    other = Segment(TokenRun((4, 5, 6, 7), 43, Context()), b"", (SlotRange(40, 4),), KEYS, Use(1))
    read = pieces(PrefixMatch((SegmentRange(one, 0, 3), SegmentRange(other, 0, 2))), 10, 5)
    assert [(p.slots, p.position, p.shift) for p in read] == [
        (SlotRange(8, 2), 0, 10),
        (SlotRange(20, 1), 2, 10),
        (SlotRange(40, 2), 43, -30),
    ]
    assert pieces(PrefixMatch((SegmentRange(one, 0, 3), SegmentRange(other, 0, 2))), 10, 3) == read[:2]
