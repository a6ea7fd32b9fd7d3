"""Encoding: computing the KV of segments that are not stored yet, as a job among the requests.

An encoding waits in the scheduler's queue like a request and shares its passes. It runs in batches of modules. Each
batch waits for room, occupies it while it runs, and then leaves its KV to the store. So a large schema never occupies
more than a share of the pool, other jobs run between batches, and finished modules stay stored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from inlay.engine.allocation import Prefill, SequenceAllocation, Wait
from inlay.engine.request import Request
from inlay.events import EncodeEvent, Fault
from inlay.kv.choices import Kept
from inlay.kv.identity import SegmentSpec


@dataclass(eq=False)
class Encoding:
    """Segments to store. The missing ones are computed, with the context that they attend to.

    Attributes:
        name: its name in messages.
        specs: the segments; their context may be left out.
        id: its name in events.
        sent: its creation time on the clock of ``arrival``, which is later for each further batch.
        tenant, weight, sequences: see scheduler.Job.
        left: the segments that are not known to be stored, by key.
        complete: True if all are stored.
        error: the fault that ended it early.
        waits_for: see Request.
        ttl_s: lifetime of the stored segments in seconds; None for no limit.
        claimed: the keys of the segments that have this lifetime already.
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
        """See scheduler.Job."""
        return self.allocation.prompt_left

    @property
    def done(self) -> int:
        """How many of the ``total`` tokens are computed or stored."""
        begun = sum(len(p.keep.ids) - p.tokens_left for p in self.allocation.prefill if p.key in self.left and p.keep)
        return sum(len(spec.ids) for spec in self.specs if spec.key not in self.left) + begun

    # The interface that the engine's thread also uses for requests, which may have several answers.

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
        """The fault that ended it early."""
        return self.error

    def batch(self, stored: Callable[[SegmentSpec], bool], tokens: int, most: int | None = None) -> list[SegmentSpec]:
        """Return the next segments that are not stored, at least one if any is left.

        Args:
            tokens: the most tokens of all segments together.
            most: the most segments. None for any number.
        """
        chosen: list[SegmentSpec] = []
        for key, spec in list(self.left.items()):
            if stored(spec):
                del self.left[key]
                continue
            tokens -= len(spec.ids)
            if chosen and (tokens < 0 or len(chosen) == most):
                break
            chosen.append(spec)
        return chosen

    def may_be_kept(self, spec: SegmentSpec, kept: Kept) -> bool:
        """Return whether tiers below the pool may hold a segment of this schema."""
        return kept is Kept.ALL or not spec.before.private

    def computed(self, prefill: Prefill) -> None:
        """Record that a segment is stored."""
        self.left.pop(prefill.key, None)

    def events(self) -> list[EncodeEvent]:
        """Return the event with the encoding's progress."""
        error = None if self.error is None else Fault.of(self.error)
        return [EncodeEvent(self.id, self.done, self.total, self.finished, error)]

    def failures(self) -> list[EncodeEvent]:
        """See Request."""
        return self.events()

    def heard(self) -> None:
        """Does nothing: events are not acknowledged."""

    def refuse(self, error: Exception) -> None:
        """End it with an error, because it can never continue."""
        self.error = error


#: A job in the engine's passes.
Task = Request | Encoding
