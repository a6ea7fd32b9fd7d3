"""Arrivals: segments that come up from the host tier layer by layer, and are read before the last layer is there.

A layer goes up once its checksum holds; who reads it waits for that one alone, and the device for its copy (``wait``).
Until all layers are up the store does not have the segment: it is read by those who were told of its arrival, in slots
that they own a share of. Where a layer is damaged or late, the rest is not waited for, and what was computed with it
is dropped by whoever did (``failed``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from threading import Condition
from typing import Protocol

from inlay.kv.codecs.codec import Slab
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.kv.policies import Use
from inlay.kv.segment import Segment, SegmentRange
from inlay.kv.tiers.record import SegmentRecord, SlabMemory
from inlay.kv.tiers.tier import Miss, TierMissError
from inlay.slots import SlotRange, total


class Source(Protocol):
    """A tier whose slabs are read one by one, in any order of segments; see HostTier.reading."""

    def reading(self, asked: SegmentRecord) -> AbstractContextManager[Callable[[int], Slab]]: ...


class Arrival:
    """One segment on its way up.

    done: how many of its tokens the pool has already. slots: for the others. deadline: until when it is waited for, on
    the clock of ``time.monotonic``.

    stored: the others, as somebody reads them who has a share of the slots; the index does not have that segment.
    """

    def __init__(
        self, spec: SegmentSpec, done: int, slots: tuple[SlotRange, ...], keys: KeyMaker, deadline: float
    ) -> None:
        self.spec = spec
        self.done = done
        self.slots = slots
        rest = spec.rest(done)
        use = Use(len(rest.ids), rest.before.tokens, module=True, frequency=1)  # by whoever computed it
        self.stored = SegmentRange(Segment(rest, b"", slots, keys, use), 0, total(slots))
        self.failed = False
        self._deadline = deadline
        self._seen: list[Callable[[], None]] = []  # by layer, what lets the computation see it
        self._news = Condition()

    @property
    def begun(self) -> bool:
        """Whether its first layer is up, or on its way there behind what the device does."""
        return bool(self._seen) and not self.failed

    @property
    def late(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.failed or time.monotonic() > self._deadline

    def put(self, seen: Callable[[], None]) -> None:
        """Note that the next layer goes up. seen: what lets the computation see it; see KVStorage.put_slab."""
        with self._news:
            self._seen.append(seen)
            self._news.notify_all()

    def fail(self) -> None:
        """Note that no further layer comes."""
        with self._news:
            self.failed = True
            self._news.notify_all()

    def wait(self, layer: int) -> None:
        """Let the computation that is begun next see a layer; at once where the segment has failed, or is late."""
        with self._news:
            left_s = self._deadline - time.monotonic()
            if not self._news.wait_for(lambda: self.failed or len(self._seen) > layer, max(0.0, left_s)):
                self.failed = True
            if self.failed:
                return
            seen = self._seen[layer]
        seen()


def bring_by_layer(
    arrivals: Sequence[Arrival],
    source: Source,
    memory: SlabMemory,
    record_of: Callable[[SegmentSpec], SegmentRecord],
    *,
    missed: Callable[[SegmentSpec, Miss], None],
    begun: Callable[[], None],
) -> list[Arrival]:
    """Bring segments up, a layer of all of them before the next one; returns those that are there, wholly.

    missed: told of each of the others, and why. begun: told when their first layers are on their way.
    """
    left = {each: _layers(each, source, memory, record_of(each.spec)) for each in arrivals}
    there: list[Arrival] = []
    try:
        with memory.beside():
            for layer in range(len(memory.layers)):
                for each, layers in list(left.items()):
                    try:
                        next(layers)
                    except TierMissError as miss:
                        del left[each]
                        each.fail()
                        missed(each.spec, miss.reason)
                if not layer:
                    begun()
        there = list(left)
    finally:
        for each, layers in left.items():  # the copies have ended, so what they read may go
            if each in there:
                next(layers, None)
            else:
                layers.close()
                each.fail()
    return there


def _layers(arrival: Arrival, source: Source, memory: SlabMemory, asked: SegmentRecord) -> Generator[None, None, None]:
    """The layers of one segment, put one by one."""
    with source.reading(asked) as slab_of:
        for layer in range(len(memory.layers)):
            slab = slab_of(layer)
            if arrival.late:
                raise TierMissError(Miss.LATE)
            arrival.put(memory.put_slab(layer, arrival.slots, slab[:, :, arrival.done :]))
            yield
