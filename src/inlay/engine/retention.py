"""What stays and what goes because somebody said so: lifetimes, pins and evictions. All of it on the engine's turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from inlay.engine.encoder import Encoding
from inlay.engine.request import Request
from inlay.kv.identity import SegmentSpec
from inlay.kv.lifetimes import Claimed, Lifetimes, Passage
from inlay.kv.misses import EVICTED, EXPIRED
from inlay.kv.pins import Pins
from inlay.kv.residency import Residency
from inlay.kv.store import SegmentStore
from inlay.prompt.splice import Fresh
from inlay.types import SegmentState

_EXPIRED_AT_ONCE = 64  # segments that are forgotten before somebody is admitted; others wait for that


class Retention:
    """Claims of requests and encodings on what they read and store, pins, and what is forgotten at once.

    private: whether the tiers below may hold what is somebody's own. pin_share: see Pins.

    over: is told of the segments whose time is, or that are evicted, by their keys.
    """

    def __init__(self, store: SegmentStore, residency: Residency, *, private: bool, pin_share: float) -> None:
        self.over: Callable[[frozenset[bytes]], None] = _nobody
        self._store = store
        self._residency = residency
        self._private = private
        self._lifetimes = Lifetimes()
        self.pins = Pins(store, residency.forms, pin_share)
        residency.on_arrival(self._arrived)

    def claim(self, request: Request) -> None:
        """Have what a request reads found for as long as it says, from now on: modules, or its text as it stands."""
        now = time.monotonic()
        for part in request.prompt.request.parts:
            if part.ttl_s is None:
                continue
            self._claim(request, part.candidates, part.ttl_s, now)
            if not part.candidates:
                self._claim_text(request, part.start, part.start + len(part.ids), part.ttl_s, now)

    def claim_encoded(self, encoding: Encoding) -> None:
        """Have what an encoding has found or stored by now found for as long as it says."""
        if encoding.ttl_s is None:
            return
        done = [spec for spec in encoding.specs if spec.key not in encoding.left and spec.key not in encoding.claimed]
        encoding.claimed.update(spec.key for spec in done)
        self._claim(encoding, done, encoding.ttl_s, time.monotonic())

    def expire(self) -> None:
        """Forget what is past its time, here and below; what is still read, as soon as it no longer is."""
        now = time.monotonic()
        over = list(islice(self._lifetimes.expired(now), _EXPIRED_AT_ONCE))
        gone = frozenset(
            thing.key for thing in over if isinstance(thing, SegmentSpec) and not self.pins.is_pinned(thing)
        )
        if gone:
            self.over(gone)
        for thing in sorted(over, key=_depth, reverse=True):
            if isinstance(thing, Passage):
                if self._store.forget_behind(thing.run, thing.first):
                    self._lifetimes.again(thing, now)
            elif self.pins.is_pinned(thing):
                self._lifetimes.again(thing, now)
            else:
                self._forget(thing, EXPIRED, now)

    def pin(
        self, specs: Sequence[SegmentSpec], owner: str, reason: str, budget: int | None, instead: str | None
    ) -> int:
        """See Pins.pin; returns what the owner's pins take, in bytes. Raises CapacityError."""
        self.pins.pin(specs, owner, reason, budget, instead=instead)
        return self.pins.bytes_of(owner)

    def unpin(self, specs: Sequence[SegmentSpec], owner: str | None, reason: str) -> int:
        """See Pins.unpin; returns what the owner's other pins take, in bytes, or everybody's."""
        self.pins.unpin(specs, owner, reason)
        return self.pins.bytes if owner is None else self.pins.bytes_of(owner)

    def pinned(self, owner: str | None) -> list[SegmentSpec]:
        """What an owner has pinned; for None, what anybody has pinned by key."""
        return self.pins.by_key() if owner is None else self.pins.of(owner)

    def evict(self, specs: Sequence[SegmentSpec]) -> int:
        """Forget segments, pinned ones too, here and below, and all that was said behind them.

        What is still read goes as soon as it no longer is. Returns how many tokens of them were here or below.
        """
        now, tokens = time.monotonic(), 0
        self.over(frozenset(form.key for spec in specs for form in self._residency.forms(spec)))
        for spec in sorted(specs, key=_depth, reverse=True):
            for form in self._residency.forms(spec):
                found = self._store.longest(form).tokens
                tokens += len(form.ids) if self._residency.holders(form.key) else found
            self.pins.release(spec)
            for form in self._residency.forms(spec):
                self._lifetimes.forget(form)
                self._forget(form, EVICTED, now)
        return tokens

    def look(self, specs: Sequence[SegmentSpec], owner: str) -> list[SegmentState | None]:
        """Of each segment or form of one, where it lies and what is said of it.

        None where it is nowhere, unless the owner has pinned the segment and no form of it is anywhere either.
        """
        now = time.monotonic()
        return [self._state(spec, owner, now) for spec in specs]

    def _state(self, spec: SegmentSpec, owner: str, now: float) -> SegmentState | None:
        found = self._store.get(spec)
        tiers = self._residency.holders(spec.key)
        if found is None and not tiers:
            if spec.source is not None or not self.pins.is_pinned(spec, owner):
                return None
            forms = self._residency.forms(spec)
            if any(self._residency.holders(form.key) or self._store.get(form) is not None for form in forms):
                return None
        left_s = self._lifetimes.left_s(spec, now)
        return SegmentState(
            key=spec.key,
            codec=spec.codec,
            tokens=len(spec.ids),
            tiers=(*(("pool",) if found is not None else ()), *tiers),
            uses=0 if found is None else min(segment.use.frequency for segment in found.segments),
            pinned=self.pins.is_pinned(spec, owner),
            ttl_s=None if left_s == math.inf else max(0.0, left_s),
        )

    def modules(self) -> tuple[SegmentSpec, ...]:
        """The segments in the pool that were stored as modules, as they are computed."""
        specs = (segment.run.lossless for segment in self._store if isinstance(segment.run, SegmentSpec))
        return tuple({spec.key: spec for spec in specs}.values())

    def _arrived(self, spec: SegmentSpec, left_s: float | None) -> None:
        """Another process, which has ended, may have said how long a segment is to be found."""
        self.pins.stored(spec)
        if left_s is not None:
            self._lifetimes.claim(spec, left_s, time.monotonic())

    def _claim(self, task: Request | Encoding, specs: Iterable[SegmentSpec], ttl_s: float, now: float) -> None:
        longer = [spec for spec in specs if self._lifetimes.claim(spec, ttl_s, now)]
        below = [spec.key for spec in longer if task.may_be_kept(spec, private=self._private)]
        self._residency.expire_at(below, ttl_s)

    def _claim_text(self, request: Request, start: int, end: int, ttl_s: float, now: float) -> None:
        """Of a run of the request's own text, the tokens at these positions, which are kept as they stand there."""
        for part in request.prompt.splice:
            if isinstance(part, Fresh) and part.run is not None and part.start <= start < part.start + len(part.ids):
                run = part.run.beginning(end - part.start)
                self._lifetimes.claim(Passage.of(run, start - part.start, self._store.keys), ttl_s, now)

    def _forget(self, spec: SegmentSpec, reason: str, now: float) -> None:
        self._store.discard(self._store.own_ends(spec))
        if self._store.get(spec) is not None and self._store.held(spec):
            self._lifetimes.again(spec, now)
            if reason == EXPIRED:
                return
        self._residency.misses.failed(spec, reason)
        self._residency.forget(spec.key)


def _nobody(keys: frozenset[bytes]) -> None:
    """Nobody has to hear of it."""


def _depth(thing: Claimed) -> int:
    """How much stands before it: what is forgotten first is what others are not encoded behind."""
    return thing.run.before.tokens + thing.first if isinstance(thing, Passage) else thing.before.tokens
