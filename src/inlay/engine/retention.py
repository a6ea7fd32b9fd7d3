"""Explicit retention: lifetimes, pins and evictions. Call everything with the engine lock held."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from inlay.engine.encoder import Encoding
from inlay.engine.lookup import begun
from inlay.engine.request import Request
from inlay.kv.choices import Kept
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.lifetimes import Claim, Lifetimes, Passage, Pins
from inlay.kv.offload.codecs import CODECS
from inlay.kv.offload.residency import Residency
from inlay.kv.offload.stack import EVICTED, EXPIRED
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import NewSpan, RecomputedSpan
from inlay.types import SegmentState

T = TypeVar("T", bytes, str)

_EXPIRED_AT_ONCE = 64  # segments that expire before the next admission; the rest expire later


class DerivedData(Protocol):
    """Data that was computed from modules or from the text of a salt, and must go with them."""

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Forget all data derived from these segments, which have expired or were evicted."""
        ...

    def forget_salt(self, salt: str) -> None:
        """Forget all data derived from the text of a salt, which was evicted."""
        ...


class Retention:
    """Lifetimes of the segments that requests and encodings read and store, pins, and explicit evictions.

    Args:
        kept: which segments the lower tiers may hold.
        pin_share: see Pins.
        derived: the data that go with expired and evicted segments and text.
    """

    def __init__(
        self,
        store: SegmentStore,
        residency: Residency,
        *,
        kept: Kept,
        pin_share: float,
        derived: Sequence[DerivedData] = (),
    ) -> None:
        self._derived = derived
        self._store = store
        self._residency = residency
        self._kept = kept
        self._lifetimes = Lifetimes()
        # By key, the time of an eviction, on the clock of arrivals. Requests sent before it store nothing of the
        # segment.
        self._evicted: dict[bytes, float] = {}
        self._evicted_texts: dict[str, float] = {}  # the same by salt, for all text of it
        self.pins = Pins(store, residency.forms, pin_share)

    def claim(self, request: Request, prefix: SegmentSpec | None = None) -> None:
        """Start the lifetimes (``ttl_s``) of the modules and the text that a request reads.

        Args:
            prefix: the schema's text at its start that the tiers below the pool may hold.
        """
        now = time.monotonic()
        self._residency.add_labels(spec for part in request.prompt.request.parts for spec in part.candidates)
        limits = [part.ttl_s for part in request.prompt.request.parts if part.copies and part.ttl_s is not None]
        if prefix is not None and limits and self._lifetimes.claim(prefix, min(limits), now, _owner(request, prefix)):
            self._residency.expire_at([prefix.key], min(limits))
        for part in request.prompt.request.parts:
            if part.ttl_s is None:
                continue
            self._claim(request, part.candidates, part.ttl_s, now)
        self._claim_text(request, now)

    def claim_encoded(self, encoding: Encoding) -> None:
        """Start the lifetimes of the segments that an encoding has found or stored so far, and add its labels."""
        self._residency.add_labels(encoding.specs)
        if encoding.ttl_s is None:
            return
        done = [spec for spec in encoding.specs if spec.key not in encoding.left and spec.key not in encoding.claimed]
        encoding.claimed.update(spec.key for spec in done)
        self._claim(encoding, done, encoding.ttl_s, time.monotonic())

    def expire(self) -> None:
        """Remove expired segments from the pool and the lower tiers. Segments in use are removed once they are
        released.
        """
        now = time.monotonic()
        over = self._lifetimes.expired(now, _EXPIRED_AT_ONCE)
        segments = (claim.thing for claims in over for claim in claims if isinstance(claim.thing, SegmentSpec))
        gone = frozenset(spec.key for spec in segments if not self.pins.is_pinned(spec))
        if gone:
            self._forget_derived(gone)
        for claims in sorted(over, key=_depth, reverse=True):
            thing, salt = claims[0].thing, claims[0].salt
            if isinstance(thing, Passage):
                self._forget_text(claims, now)
            elif self.pins.is_pinned(thing):
                self._lifetimes.again(thing, now, salt)
            else:
                self._expire(thing, now, salt)

    def pin(
        self, specs: Sequence[SegmentSpec], owner: str, reason: str, budget: int | None, instead: str | None
    ) -> int:
        """See Pins.pin. Returns the bytes of all pins of the owner. Raises CapacityError."""
        self.pins.pin(specs, owner, reason, budget, instead=instead)
        return self.pins.bytes_of(owner)

    def unpin(self, specs: Sequence[SegmentSpec], owner: str | None, reason: str) -> int:
        """See Pins.unpin. Returns the bytes of the owner's other pins; of all pins for the owner None."""
        self.pins.unpin(specs, owner, reason)
        return self.pins.bytes if owner is None else self.pins.bytes_of(owner)

    def pinned(self, owner: str | None) -> list[SegmentSpec]:
        """Return the segments that an owner has pinned. For the owner None, return all that are pinned by key."""
        return self.pins.by_key() if owner is None else self.pins.of(owner)

    def evict(
        self, specs: Sequence[SegmentSpec], oldest: float | None = None, labels: frozenset[bytes] = frozenset()
    ) -> int:
        """Remove segments, even pinned ones, from all tiers, and all text that contains or follows them.

        Segments that a request still reads are removed when it ends. Requests sent before do not store them again.

        Args:
            specs: the segments.
            oldest: the send time of the oldest running request; None without one.
            labels: all segments with any of these labels are removed, too, and all text that contains or follows them.

        Returns:
            The number of tokens removed, of segments and text in the pool, and of segments that were below it alone.
        """
        specs = self._with_labelled(specs, labels)
        below = (form for spec in specs for form in self._residency.forms(spec) if self._residency.holders(form.key))
        tokens = sum(len(form.ids) - begun(self._store, form).tokens for form in below)
        forms = [form for spec in specs for form in self._every_form(spec)]
        # A prompt that reads the same module in place may name it by another policy's key, but has its label.
        in_place = labels | {spec.labels[-1] for spec in specs if spec.labels}
        names = in_place.union(form.key for form in forms)
        _note(self._evicted, names, oldest)
        self._forget_derived(names)
        for form in forms:
            self.pins.release(form)
            self._lifetimes.forget(form)
        tokens += self._store.evict_modules(forms, in_place)
        for form in forms:
            self._residency.misses.failed(form, EVICTED)
            self._residency.forget(form.key)
        tokens += self._residency.forget_labelled(labels)
        self._residency.forget_prefixes(in_place)
        return tokens

    def _with_labelled(self, specs: Sequence[SegmentSpec], labels: frozenset[bytes]) -> list[SegmentSpec]:
        """These segments, and all segments with any of the labels that this process knows, each once."""
        found = {spec.key: spec for spec in specs}
        if labels:
            for spec in (*self._store.modules().values(), *self._residency.known(), *self.pins.specs()):
                if not labels.isdisjoint(self._residency.labels(spec)):
                    found.setdefault(spec.lossless.key, spec.lossless)
        return list(found.values())

    def evict_texts(self, salt: str, oldest: float | None = None) -> int:
        """Evict all text of requests with a salt. Returns its number of tokens.

        Args:
            salt: the cache salt.
            oldest: see ``evict``.
        """
        _note(self._evicted_texts, [salt], oldest)
        for each in self._derived:
            each.forget_salt(salt)
        return self._store.evict(self._store.texts(salt))

    def may_keep(self, task: Request | Encoding, run: TokenRun) -> bool:
        """True if no token of a run that a task has computed was evicted since the task was sent."""
        if not self._evicted and not self._evicted_texts:
            return True
        if isinstance(run, SegmentSpec):
            return all(self._evicted.get(name, -math.inf) < task.sent for name in run.names)
        return not isinstance(task, Request) or not self.reads_evicted(task, run.end)

    def reads_evicted(self, request: Request, end: float = math.inf) -> bool:
        """True if some of a prompt up to position ``end`` was evicted since the request was sent."""
        if not self._evicted and not self._evicted_texts:
            return False
        origin = request.prompt.origin(end)
        evicted_at = [self._evicted[key] for key in self._evicted.keys() & origin.modules]
        evicted_at.append(self._evicted_texts.get(origin.salt, -math.inf))
        return max(evicted_at) >= request.sent

    def _every_form(self, spec: SegmentSpec) -> list[SegmentSpec]:
        """A segment and its forms through all codecs: files of an earlier setting may lie in the tiers."""
        plain = spec.lossless
        return [plain, *(plain.through(codec, self._store.keys) for codec in CODECS if codec != plain.codec)]

    def look(self, specs: Sequence[SegmentSpec], owner: str) -> list[SegmentState | None]:
        """The state of each segment or form: its tiers, tokens, uses, pin and lifetime.

        A prefix in the pool counts, because requests read it. An entry is None if nothing is stored, unless the owner
        has pinned the segment and no form of it is stored either.
        """
        now = time.monotonic()
        return [self._state(spec, owner, now) for spec in specs]

    def _state(self, spec: SegmentSpec, owner: str, now: float) -> SegmentState | None:
        found, tiers, tokens = self._store.get(spec), self._residency.holders(spec.key), len(spec.ids)
        if found is None and not tiers and (part := begun(self._store, spec)).tokens:
            found, tokens = part, part.tokens
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
            tokens=tokens,
            tiers=(*(("pool",) if found is not None else ()), *tiers),
            uses=0 if found is None else min(segment.use.frequency for segment in found.segments),
            pinned=self.pins.is_pinned(spec, owner),
            ttl_s=None if left_s == math.inf else max(0.0, left_s),
            idle_s=None if found is None else now - max(segment.use.read_s for segment in found.segments),
        )

    def resident(self, specs: Sequence[SegmentSpec]) -> list[dict[str, int]]:
        """Return the stored tokens of each segment by tier. A token counts in its nearest tier alone."""
        found = []
        for spec in specs:
            tiers: dict[str, int] = {}
            in_pool = begun(self._store, spec).tokens
            if in_pool:
                tiers["pool"] = in_pool
            if in_pool < len(spec.ids):
                holders = (name for form in self._residency.forms(spec) for name in self._residency.holders(form.key))
                if (nearest := next(holders, None)) is not None:
                    tiers[nearest] = len(spec.ids) - in_pool
            found.append(tiers)
        return found

    def modules(self) -> tuple[SegmentSpec, ...]:
        """The modules with tokens in the pool, or stored below it by this process, in their lossless form."""
        found = (*self._residency.below_pool(), *self._store.modules().values())
        return tuple({spec.lossless.key: spec.lossless for spec in found}.values())

    def loaded(self, spec: SegmentSpec, left_s: float | None) -> None:
        """Hold a segment that has loaded from a lower tier, if it is pinned. Take over its lifetime in that tier.

        Args:
            left_s: the remaining lifetime in seconds, set by a process that may have ended. None for no end.
        """
        self.pins.stored(spec)
        if left_s is not None:
            self._lifetimes.claim(spec, left_s, time.monotonic())

    def _forget_derived(self, keys: frozenset[bytes]) -> None:
        for each in self._derived:
            each.forget_modules(keys)

    def _claim(self, task: Request | Encoding, specs: Iterable[SegmentSpec], ttl_s: float, now: float) -> None:
        longer = [spec for spec in specs if self._lifetimes.claim(spec, ttl_s, now, _owner(task, spec))]
        below = [spec.key for spec in longer if task.may_be_kept(spec, self._kept)]
        self._residency.expire_at(below, ttl_s)

    def _claim_text(self, request: Request, now: float) -> None:
        """Start the lifetimes of a request's own text and of its recomputed modules, which are stored in place."""
        composed, salt = request.prompt.composed, request.prompt.request.salt
        fresh = [part for part in composed if isinstance(part, NewSpan) and part.run is not None]
        fresh.sort(key=_start)
        recomputed = {part.positions[0]: part.run for part in composed if isinstance(part, RecomputedSpan)}
        first_ones = sorted(recomputed)
        # by index in ``fresh``: (end, first, ttl_s)
        ranges: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for part in request.prompt.request.parts:
            if part.ttl_s is None or not part.ids:
                continue
            number = bisect_left(first_ones, part.start)
            if number < len(first_ones) and first_ones[number] < part.start + len(part.ids):
                run = recomputed[first_ones[number]]
                (passage,) = Passage.all_of(run, [(0, len(run.ids))], self._store.keys)
                self._lifetimes.claim(passage, part.ttl_s, now, salt)
            at = bisect_right(fresh, part.start, key=_start) - 1
            if at < 0:
                continue
            first, length = part.start - fresh[at].start, len(fresh[at].ids)
            if first < length:
                ranges[at].append((min(first + len(part.ids), length), first, part.ttl_s))
        for at, found in ranges.items():
            whole = fresh[at].run
            assert whole is not None, "only what may be found is looked for"
            found.sort()
            passages = Passage.all_of(whole, [(first, end) for end, first, _ in found], self._store.keys)
            for passage, (_, _, ttl_s) in zip(passages, found, strict=True):
                self._lifetimes.claim(passage, ttl_s, now, salt)

    def _forget_text(self, claims: Sequence[Claim], now: float) -> None:
        """Remove passages of one run: its text from the first of them on."""
        first, end = _range(claims)
        if self._store.forget_behind(claims[0].run.prefix(end), first):
            for claim in claims:
                self._lifetimes.again(claim.thing, now, claim.salt)

    def _expire(self, spec: SegmentSpec, now: float, salt: str) -> None:
        self._store.forget_module(spec)
        if self._store.get(spec) is not None and self._store.held(spec):
            self._lifetimes.again(spec, now, salt)
            return
        self._residency.misses.failed(spec, EXPIRED)
        self._residency.forget(spec.key)


def _note(evicted: dict[T, float], things: Iterable[T], oldest: float | None) -> None:
    """Record evictions now, and drop those that are older than all running requests."""
    for thing in [thing for thing, at in evicted.items() if oldest is None or at < oldest]:
        del evicted[thing]
    if oldest is not None:
        evicted.update(dict.fromkeys(things, time.perf_counter()))


def _start(part: NewSpan) -> int:
    return part.start


def _owner(task: Request | Encoding, spec: SegmentSpec) -> str:
    """Return the owner of a claim on a segment: the task's salt or tenant. "" for a public segment."""
    if not spec.before.private:
        return ""
    return task.prompt.request.salt if isinstance(task, Request) else task.tenant


def _range(claims: Sequence[Claim]) -> tuple[int, int]:
    """The first and the end position of passages of one run, taken together."""
    passages = [claim.thing for claim in claims if isinstance(claim.thing, Passage)]
    return min(passage.first for passage in passages), max(passage.end for passage in passages)


def _depth(claims: Sequence[Claim]) -> int:
    """How many tokens precede these claims. The deepest are removed first, because no later segment depends on them."""
    first = _range(claims)[0] if isinstance(claims[0].thing, Passage) else 0
    return claims[0].run.before.tokens + first
