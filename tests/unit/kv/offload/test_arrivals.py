"""Segments that load layer by layer: their order, the requests that wait for them, and failed loads."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from inlay.kv.offload.loader import Arrival, bring_by_layer
from inlay.kv.offload.tier import Miss, TierMissError
from inlay.slots import SlotRange
from tests.unit.kv.offload.segments import KEYS, LAYERS, record_of, slabs_of, spec_of

ONE, TWO = spec_of(1, 20), spec_of(2, 10)


class Source:
    """A tier that notes what is read of it. damaged: by key, from which layer on."""

    def __init__(self, damaged: dict[bytes, int] | None = None) -> None:
        self.asked: list[tuple[bytes, int]] = []
        self.open: list[bytes] = []
        self.damaged = damaged or {}

    @contextmanager
    def reading(self, asked):
        self.open.append(asked.key)
        spec = ONE if asked.key == ONE.key else TWO

        def slab_of(layer):
            self.asked.append((asked.key, layer))
            if layer >= self.damaged.get(asked.key, len(LAYERS)):
                raise TierMissError(Miss.CORRUPT)
            return slabs_of(spec)[layer]

        try:
            yield slab_of
        finally:
            self.open.remove(asked.key)


class Memory:
    """A pool that notes what is put. fails: the layer at which nothing can be put any more."""

    def __init__(self, source: Source, fails: int | None = None) -> None:
        self.layers = LAYERS
        self.fails = fails
        self.put: list[tuple[int, SlotRange]] = []
        self.seen: list[tuple[int, SlotRange]] = []
        self.slabs: list[np.ndarray] = []
        self._source = source

    @contextmanager
    def beside(self):
        yield
        assert len(self._source.open) == len({slots for _, slots in self.put if self._last(slots)})

    def put_slab(self, layer, slots, slab):
        if layer == self.fails:
            raise RuntimeError("the device fails")
        (run,) = slots
        self.put.append((layer, run))
        self.slabs.append(slab)
        return lambda: self.seen.append((layer, run))

    def _last(self, slots: SlotRange) -> bool:
        return (len(LAYERS) - 1, slots) in self.put


def arrival(spec, first: int, *, done: int = 0, left_s: float = 30.0) -> Arrival:
    return Arrival(spec, done, (SlotRange(first, len(spec.ids) - done),), KEYS, time.monotonic() + left_s)


def bring(arrivals, source, memory) -> tuple[list[Arrival], list, list]:
    begun: list[int] = []
    there, missed = bring_by_layer(arrivals, source, memory, record_of, begun=lambda: begun.append(len(memory.put)))
    return there, [(each.spec, reason) for each, reason in missed], begun


def test_one_layer_of_all_segments_loads_before_the_next():
    one, two, source = arrival(ONE, 0, done=4), arrival(TWO, 16), Source()
    memory = Memory(source)
    there, missed, begun = bring([one, two], source, memory)
    assert there == [one, two]
    assert memory.put == [(0, SlotRange(0, 16)), (0, SlotRange(16, 10)), (1, SlotRange(0, 16)), (1, SlotRange(16, 10))]
    assert np.array_equal(memory.slabs[0], slabs_of(ONE)[0][:, :, 4:]), "without what the pool has"
    assert (missed, begun, source.open) == ([], [2], [])
    one.wait(1)
    assert memory.seen == [(1, SlotRange(0, 16))]
    assert (one.stored.tokens, one.stored.start, one.stored.slots) == (16, 4, (SlotRange(0, 16),))


@pytest.mark.parametrize("layer", [0, 1])
def test_damaged_segment_does_not_affect_others(layer):
    one, two, source = arrival(ONE, 0), arrival(TWO, 20), Source({ONE.key: layer})
    memory = Memory(source)
    there, missed, _ = bring([one, two], source, memory)
    assert there == [two]
    assert missed == [(ONE, Miss.CORRUPT)]
    assert (one.failed, one.begun, two.failed) == (True, False, False)
    one.wait(0)
    one.wait(1)
    assert memory.seen == [], "nobody is told to see what is not there"
    assert source.open == []


def test_fault_ends_all_waits():
    one, two, source = arrival(ONE, 0), arrival(TWO, 20), Source()
    with pytest.raises(RuntimeError, match="the device fails"):
        bring([one, two], source, Memory(source, fails=1))
    assert one.failed
    assert two.failed
    assert source.open == []


def test_request_waits_for_one_layer_only():
    coming, memory = arrival(ONE, 0), []
    waited = threading.Thread(target=lambda: (coming.wait(1), memory.append("computed")))
    coming.put(lambda: memory.append(0))
    coming.wait(0)
    assert memory == [0]
    waited.start()
    waited.join(0.05)
    assert memory == [0]
    coming.put(lambda: memory.append(1))
    waited.join(30)
    assert memory == [0, 1, "computed"]


def test_timeout_fails_the_load():
    """Also for the reading thread, which skips the segment."""
    late, source = arrival(ONE, 0, left_s=0.0), Source()
    late.wait(0)
    assert late.failed
    there, missed, _ = bring([late], source, Memory(source))
    assert (there, missed) == ([], [(ONE, Miss.LATE)])
