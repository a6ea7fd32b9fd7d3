"""Free spans: found by place and size, and joined with their neighbours."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from inlay.kv.pool import FreeSpans
from inlay.slots import SlotRange, join


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 39), st.integers(1, 9)), max_size=80))
def test_free_spans_equal_a_plain_set_of_chunks(steps):
    spans, free = FreeSpans(40), set(range(40))
    for add, at, length in steps:
        if add and not free & set(range(at, min(at + length, 40))):
            spans.add(at, min(at + length, 40))
            free |= set(range(at, min(at + length, 40)))
        elif not add and free:
            first = spans.smallest(length)
            fitting = [span for span in spans.ranges if span.length >= length]
            assert first == min((span.length, span.first) for span in fitting)[1] if fitting else first is None
            assert spans.largest() == min(spans.ranges, key=lambda span: (-span.length, span.first))
            taken = spans.largest() if first is None else SlotRange(first, length)
            assert spans.take(taken.first, taken.length) == taken
            free -= set(range(taken.first, taken.end))
        assert spans.ranges == join(SlotRange(chunk, 1) for chunk in sorted(free))
        assert (spans.chunks, len(spans)) == (len(free), len(spans.ranges))
        for span in spans.ranges:
            assert spans.behind(span.first) == spans.before(span.end) == span.length


def test_freed_spans_leave_no_memory():
    spans = FreeSpans(3)
    spans.take(0, 3)
    spans.add(2, 3)
    tracemalloc.start()
    try:
        for _ in range(5000):
            spans.add(0, 1)
            spans.take(0, 1)
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 8192
