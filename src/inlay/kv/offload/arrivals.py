"""Arrivals: segments that load from the host tier layer by layer, and are read before the last layer is resident.

A layer is copied to the pool once its checksum holds. A reader waits only for that layer, and the device for its copy
(``wait``). The store lists the segment only when all layers are resident. Until then only the requests that know of the
arrival read it, in slots that they share. If a layer is damaged or late, the arrival fails (``failed``). The requests
then drop the results that they computed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from threading import Condition
from typing import Protocol

from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.record import SegmentRecord, SlabMemory
from inlay.kv.offload.tier import Miss, TierMissError
from inlay.kv.policies import Use
from inlay.kv.segment import Segment, SegmentRange
from inlay.slots import SlotRange, total


class SlabSource(Protocol):
    """A tier that reads slabs one by one, in any order of segments; see HostTier.reading."""

    def reading(self, asked: SegmentRecord) -> AbstractContextManager[Callable[[int], Slab]]: ...


class Arrival:
    """One segment that is loading.

    Args:
        done: the number of its tokens that are resident already.
        slots: for the other tokens.
        deadline: the end of the wait, on the clock of ``time.monotonic``.

    Attributes:
        stored: the other tokens, for readers that share the slots. This segment is not in the index.
    """

    def __init__(
        self, spec: SegmentSpec, done: int, slots: tuple[SlotRange, ...], keys: KeyMaker, deadline: float
    ) -> None:
        self.spec = spec
        self.done = done
        self.slots = slots
        rest = spec.rest(done)
        # one read, by the computation that made it
        use = Use(len(rest.ids), rest.before.tokens, module=True, frequency=1)
        self.stored = SegmentRange(Segment(rest, b"", slots, keys, use), 0, total(slots))
        self.failed = False
        self._deadline = deadline
        self._seen: list[Callable[[], None]] = []  # per layer: makes it visible to the computation
        self._news = Condition()

    @property
    def begun(self) -> bool:
        """True if its first layer is resident or queued on the device."""
        return bool(self._seen) and not self.failed

    @property
    def late(self) -> bool:
        """True if it has failed or its deadline is over."""
        return self.failed or time.monotonic() > self._deadline

    def put(self, seen: Callable[[], None]) -> None:
        """Record that the next layer is being copied.

        Args:
            seen: makes the layer visible to the computation; see KVStorage.put_slab.
        """
        with self._news:
            self._seen.append(seen)
            self._news.notify_all()

    def fail(self) -> None:
        """Record that no further layer comes."""
        with self._news:
            self.failed = True
            self._news.notify_all()

    def wait(self, layer: int) -> None:
        """Make a layer visible to the next computation. Returns at once if the arrival has failed or is late."""
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
    source: SlabSource,
    memory: SlabMemory,
    record_of: Callable[[SegmentSpec], SegmentRecord],
    *,
    begun: Callable[[], None],
) -> tuple[list[Arrival], list[tuple[Arrival, Miss]]]:
    """Load segments, one layer of all of them before the next layer.

    Args:
        begun: called when the first layers are on their way.

    Returns:
        The arrivals that are wholly resident, and those that failed, each with the reason.
    """
    left = {each: _layers(each, source, memory, record_of(each.spec)) for each in arrivals}
    there: list[Arrival] = []
    missed: list[tuple[Arrival, Miss]] = []
    try:
        with memory.beside():
            for layer in range(len(memory.layers)):
                for each, layers in list(left.items()):
                    try:
                        next(layers)
                    except TierMissError as miss:
                        del left[each]
                        each.fail()
                        missed.append((each, miss.reason))
                if not layer:
                    begun()
        there = list(left)
    finally:
        for each, layers in left.items():  # the copies have ended, so their sources may be released
            if each in there:
                next(layers, None)
            else:
                layers.close()
                each.fail()
    return there, missed


def _layers(
    arrival: Arrival, source: SlabSource, memory: SlabMemory, asked: SegmentRecord
) -> Generator[None, None, None]:
    """Copy the layers of one segment, one per step."""
    with source.reading(asked) as slab_of:
        for layer in range(len(memory.layers)):
            slab = slab_of(layer)
            if arrival.late:
                raise TierMissError(Miss.LATE)
            arrival.put(memory.put_slab(layer, arrival.slots, slab[:, :, arrival.done :]))
            yield
