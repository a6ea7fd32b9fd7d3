"""Encoding: computing the KV of segments that are not stored yet, as a job among the requests.

An encoding stands in the scheduler's line like a request, and its tokens are computed in the same passes. It is done in
batches of modules: each waits for room, holds it while it is computed, and leaves it to the store, so that a large
schema never holds more than a share of the pool, others get their turn between two batches, and what is done stays
whenever it ends.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from inlay.engine.allocation import Prefill, SequenceAllocation
from inlay.engine.pending import Wait
from inlay.engine.request import Request
from inlay.events import EncodeEvent, Fault
from inlay.kv.identity import SegmentSpec
from inlay.kv.tiers.tier import Kept


@dataclass(eq=False)
class Encoding:
    """Segments that are to be stored, with what the missing ones attend to.

    name: what messages call it. specs: the segments; context may be left out. id: what events call it.
    sent: when it was made, on the clock of ``arrival``, which is later for each further batch.
    tenant, weight, sequences: see jobs.Job. left: what is not known to be stored, by key. complete: whether all
    has been. error: what ended it before its time. waits_for: see Request.
    ttl_s: for how many seconds the segments are to be found from when they are stored; None for as long as there is
    room. claimed: the keys of those that have been given that time.
    """

    name: str
    specs: tuple[SegmentSpec, ...]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    sent: float = field(default_factory=time.perf_counter)
    deadline: float | None = None
    sequences: int = 0
    allocation: SequenceAllocation = field(default_factory=SequenceAllocation)
    left: dict[bytes, SegmentSpec] = field(default_factory=dict)
    waits_for: Wait | None = None
    ttl_s: float | None = None
    claimed: set[bytes] = field(default_factory=set)
    complete: bool = False
    error: BaseException | None = None
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.left = {spec.key: spec for spec in self.specs}
        self.total = sum(len(spec.ids) for spec in self.specs)

    @property
    def prompt_left(self) -> int:
        """See jobs.Job."""
        return self.allocation.prompt_left

    @property
    def done(self) -> int:
        """How many of the ``total`` tokens are computed, or were stored."""
        begun = sum(len(p.keep.ids) - p.tokens_left for p in self.allocation.prefill if p.key in self.left and p.keep)
        return sum(len(spec.ids) for spec in self.specs if spec.key not in self.left) + begun

    # What the engine's thread asks of a request, whose answers may be several.

    @property
    def leader(self) -> None:
        return None

    @property
    def family(self) -> tuple[Encoding]:
        return (self,)

    @property
    def finished(self) -> bool:
        return self.complete or self.error is not None

    @property
    def answered(self) -> bool:
        return self.finished

    @property
    def failure(self) -> BaseException | None:
        """What ended it before its time."""
        return self.error

    def batch(self, stored: Callable[[SegmentSpec], bool], tokens: int) -> list[SegmentSpec]:
        """The next segments that are not stored: of at most that many tokens, but one where there is any."""
        chosen: list[SegmentSpec] = []
        for key, spec in list(self.left.items()):
            if stored(spec):
                del self.left[key]
                continue
            tokens -= len(spec.ids)
            if chosen and tokens < 0:
                break
            chosen.append(spec)
        return chosen

    def may_be_kept(self, spec: SegmentSpec, kept: Kept) -> bool:
        """Return whether tiers below the pool may hold a segment of this schema."""
        return kept is Kept.ALL or not spec.before.private

    def computed(self, prefill: Prefill) -> None:
        """Note that a segment is stored."""
        self.left.pop(prefill.key, None)

    def events(self) -> list[EncodeEvent]:
        """How far it is."""
        error = None if self.error is None else Fault.of(self.error)
        return [EncodeEvent(self.id, self.done, self.total, self.finished, error)]

    def failures(self) -> list[EncodeEvent]:
        """See Request."""
        return self.events()

    def heard(self) -> None:
        """Its listener has heard of all of ``events``."""

    def refuse(self, error: Exception) -> None:
        """End it, since it can never go on."""
        self.error = error


#: What runs in the passes of an engine.
Task = Request | Encoding
