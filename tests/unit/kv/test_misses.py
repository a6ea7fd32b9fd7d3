"""The memory of missing segments, and its size."""

from __future__ import annotations

import tracemalloc

from inlay.kv.identity import KeyMaker, SegmentSpec, specify
from inlay.kv.offload.stack import EVICTED, NEVER_SEEN, MissReasons

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)


def segment(number: int) -> SegmentSpec:
    return specify((number, 7, 9), 0, (), KEYS)


def test_latest_misses_are_remembered():
    reasons = MissReasons(KEYS, most=10)
    for number in range(25):
        reasons.stored(segment(number))
    said = [reasons.explain(segment(number)) for number in range(25)]
    assert said == [NEVER_SEEN] * 15 + [EVICTED] * 10


def test_segment_takes_little_memory():
    reasons, segments = MissReasons(KEYS, most=5000), [segment(number) for number in range(3000)]
    for spec in segments:
        reasons.explain(spec)  # fills the segment's cached values first
    tracemalloc.start()
    try:
        for spec in segments:
            reasons.stored(spec)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 3000 * 400, "what all segments have in common is one object"
