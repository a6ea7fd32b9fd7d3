"""Token events are plain data: they go through bytes."""

from __future__ import annotations

import pytest

from inlay.errors import CapacityError, ParameterError, Place, PMLError, Problem
from inlay.events import EncodeEvent, Fault, TokenEvent, events_from_bytes, events_to_bytes
from inlay.types import RequestMetrics, Usage
from tests.raising import raises

EVENTS = [
    TokenEvent("a", 0),
    TokenEvent("a \ud800", 2, [5, 6], 7, elapsed_s=0.25),
    TokenEvent("a", 0, [5], 0, logprobs=[[(5, -0.5, 2), (9, -0.25, 1)]], finish_reason="stop", stop_reason=5),
    TokenEvent("a", 0, [5], 0, distributions=[b"\x00\xff\x80\x3f", b""], finish_reason="length"),
    TokenEvent("a", 0, usage=Usage(3, 2, 1, 1, 1, 1), metrics=RequestMetrics(0.5, 0.0, None, 0.1, 0.2, 0.3)),
    TokenEvent("a", 1, error=Fault("CapacityError", "too small")),
    EncodeEvent("b", 3, 9),
    EncodeEvent("b", 9, 9, finished=True),
    EncodeEvent("b", 0, 0, finished=True, error=Fault("RuntimeError", "broken")),
]


def test_events_go_through_bytes():
    assert events_from_bytes(events_to_bytes(EVENTS)) == EVENTS


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (CapacityError("too small"), CapacityError, "too small"),
        (ParameterError("wrong"), ParameterError, "wrong"),
        (RuntimeError("broken"), RuntimeError, "broken"),
        (KeyError("x"), RuntimeError, "KeyError: 'x'"),
        (PMLError([Problem(Place("s"), "wrong")]), RuntimeError, "PMLError: s: wrong"),
    ],
)
def test_error_keeps_its_type_only_within_the_process(error, kind, message):
    event = TokenEvent("a", 0, error=Fault.of(error))
    assert event.error.exception() is error
    (read,) = events_from_bytes(events_to_bytes([event]))
    told = read.error.exception()
    assert (type(told), str(told)) == (kind, message)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x80", "cluster.damaged_events"),
        (b"[]", "cluster.damaged_events"),
        (b'{"version":1,"events":[]}', "cluster.other_version"),
        (b'{"version":3,"events":[{"type":"token"}]}', "cluster.damaged_events"),
        (b'{"version":3,"events":[{"type":"token","request_id":"a","index":0,"x":1}]}', "cluster.damaged_events"),
    ],
)
def test_invalid_event_bytes_are_rejected(data, code):
    with raises(code):
        events_from_bytes(data)
