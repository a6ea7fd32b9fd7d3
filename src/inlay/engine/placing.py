"""Room for requests in the pool: what of a prompt is stored, what is missing, and where that goes.

A request reads stored segments where they lie. What is missing becomes its own prefill work, modules first, in slots
that it owns; as soon as a part is computed the store keeps it, so that everybody else finds it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from inlay.attention.plan import Piece, Span, pieces_at
from inlay.cache.contexts import in_encoding_order
from inlay.cache.index import Found, shared_length
from inlay.cache.pool import Run, cut
from inlay.cache.segment import Hold, Segment, SegmentSpec, TokenRun
from inlay.cache.splice import Cached, Fresh, Splice, pieces
from inlay.cache.store import SegmentStore
from inlay.engine.request import Request
from inlay.engine.scheduler import Admission
from inlay.engine.seat import Prefill, Seat, Work
from inlay.errors import CapacityError

#: So many tokens of what somebody else is computing are worth waiting for.
_WORTH_WAITING = 16


@dataclass(frozen=True, slots=True)
class _Survey:
    """A splice as the store has it.

    modules: every module segment that the splice reads or encodes behind, where it lies, or None.
    beginnings: for each part of the splice, what is stored of a fresh run's beginning; None for modules.
    """

    modules: dict[bytes, tuple[SegmentSpec, Found | None]]
    beginnings: tuple[Found | None, ...]

    @property
    def found(self) -> list[Found]:
        modules = [found for _, found in self.modules.values() if found is not None]
        return modules + [found for found in self.beginnings if found is not None]

    @property
    def missing(self) -> list[SegmentSpec]:
        return [spec for spec, found in self.modules.values() if found is None]

    @property
    def missing_tokens(self) -> int:
        return sum(len(spec.ids) for spec in self.missing)


class Placing:
    """Seats requests over one store; the scheduler's memory."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._pending: dict[int, list[TokenRun]] = {}  # first token → runs that somebody is computing

    def admit(self, request: Request) -> Admission:
        """See scheduler.Memory. The request's usage is that of its first admission."""
        since = time.perf_counter()
        splice = request.splice_now()
        survey = self._survey(splice)
        if self._somebody_computes(splice, survey):
            return Admission.LATER
        if self._chunks_needed(splice, survey) > self._store.pool.chunks:
            # What is stored may lie scattered over more chunks than it fills; computed anew it lies side by side.
            survey = self._survey(splice, find=False)
            self._check_capacity(self._chunks_needed(splice, survey))
        hold = self._store.hold(*survey.found)  # before room is made: what is read must not be evicted for it
        slots = self._room(splice, survey)
        if slots is None:
            hold.release()
            return Admission.NO_ROOM
        seat = _seat(splice, survey, *slots, hold)
        for prefill in seat.prefill:
            if prefill.pending is not None:
                self._pending.setdefault(prefill.pending.ids[0], []).append(prefill.pending)
        if request.seated is None:
            request.count(survey.modules, survey.beginnings, self._knows_last(splice, survey))
            request.fetch_s = time.perf_counter() - since
        request.sit(seat)
        return Admission.ADMITTED

    def grow(self, request: Request) -> bool:
        """See scheduler.Memory."""
        seat = request.seat
        if seat.room > seat.tokens:
            return True
        try:
            seat.extend(self._store.allocate(1, after=seat.tail[-1]))
        except CapacityError:
            return False
        return True

    def release(self, request: Request) -> None:
        """Take back a request's slots; what it has computed stays in the store until others need the room.

        That is also a prompt that is computed in part, unless the request has failed.

        Nothing stays of a request whose logits were damaged: its keys and values may be, too.
        """
        seat = request.seat
        for prefill in seat.prefill:
            self._forget(prefill)
            begun = None if request.error is not None else prefill.begun()
            if begun is not None:  # a failed pass would have computed some of it, and did not
                self._store.insert(*begun)
        suspect = self._own(request, seat.hold.segments) if request.damaged else []
        kept = None if request.damaged else seat.kept(tuple(request.token_ids[request.seated_at :]))
        if kept is not None and self._is_stored(kept[0], len(kept[0].ids) - seat.decoded):
            self._store.insert(*kept)
        self._store.pool.free(seat.modules)
        self._store.pool.free(seat.tail)
        seat.hold.release()
        self._store.discard(suspect)
        request.stand()

    def _own(self, request: Request, segments: Iterable[Segment]) -> list[Segment]:
        """Those segments that lie in chunks of the request's own: it has computed them, and the store has kept them."""
        pool = self._store.pool
        own = set(pool.chunks_of(request.seat.modules + request.seat.tail))
        return [segment for segment in segments if own.issuperset(pool.chunks_of(segment.slots))]

    def computed(self, request: Request, prefill: Prefill) -> None:
        """Keep a part of a request's prompt, now that all of it is computed.

        The request reads it in its own slots, and holds just that: where another copy is stored already, that one may
        go.
        """
        seat = request.seat
        seat.prefill.remove(prefill)
        if prefill.keep is not None:
            self._forget(prefill)
            if prefill.module:
                request.encode_s = time.perf_counter() - seat.since
            kept = self._store.insert(prefill.keep, prefill.slots)
            seat.hold.add(self._own(request, kept.segments))

    def _is_stored(self, run: TokenRun, tokens: int) -> bool:
        """Whether a run's beginning is: what follows a beginning that has gone would be stored without it."""
        return self._store.longest(run, most=tokens).tokens == tokens

    def _forget(self, prefill: Prefill) -> None:
        if prefill.pending is not None:
            first = prefill.pending.ids[0]
            self._pending[first].remove(prefill.pending)
            if not self._pending[first]:
                del self._pending[first]

    def _survey(self, splice: Splice, *, find: bool = True) -> _Survey:
        """What is stored of a splice; nothing of it where ``find`` is False."""
        specs = in_encoding_order(part.spec for part in splice if isinstance(part, Cached))
        modules = {spec.key: (spec, self._store.get(spec) if find else None) for spec in specs}
        wanted = {part.spec.key for part in splice if isinstance(part, Cached)}
        beginnings = [
            self._store.longest(part.run, most=most) if find and isinstance(part, Fresh) and part.run else None
            for part, most in zip(splice, _readable(splice), strict=True)
        ]
        needed = {spec.key for spec in in_encoding_order(modules[key][0] for key in wanted if modules[key][1] is None)}
        return _Survey({key: entry for key, entry in modules.items() if key in wanted | needed}, tuple(beginnings))

    def _knows_last(self, splice: Splice, survey: _Survey) -> bool:
        """Whether the KV of a prompt's last token is stored, and computed again for the logits behind it."""
        last, found = splice[-1], survey.beginnings[-1]
        if isinstance(last, Fresh) and last.run is not None:
            almost = found is not None and found.tokens == len(last.ids) - 1
            return almost and self._store.longest(last.run).tokens == len(last.ids)
        before = splice[-2] if len(splice) > 1 else None  # open_end took the last token of this module
        return isinstance(before, Cached) and survey.modules[before.spec.key][1] is not None

    def _somebody_computes(self, splice: Splice, survey: _Survey) -> bool:
        if not self._pending:
            return False
        if any(self._is_pending(spec.run, 0, len(spec.ids)) for spec in survey.missing):
            return True
        parts = zip(splice, survey.beginnings, _readable(splice), strict=True)
        return any(
            self._is_pending(part.run, found.tokens, most)
            for part, found, most in parts
            if isinstance(part, Fresh) and part.run is not None and found is not None
        )

    def _is_pending(self, run: TokenRun, done: int, most: int) -> bool:
        """Whether somebody computes enough of a run's tokens from ``done`` on, of which the first ``most`` are read."""
        if done >= most:
            return False
        worth = min(_WORTH_WAITING, most - done)
        alike = [
            other
            for other in self._pending.get(run.ids[done], ())
            if shared_length(other.ids, run.ids, done, most) >= worth
        ]
        if not alike:
            return False
        place = self._store.place(run.rest(done))
        return any(self._store.place(other) == place for other in alike)

    def _chunks_needed(self, splice: Splice, survey: _Survey) -> int:
        """The chunks that a request holds when it sits down, those of what it finds and those of its own."""
        pool = self._store.pool
        held = {c for found in survey.found for segment in found.segments for c in pool.chunks_of(segment.slots)}
        return len(held) + pool.chunks_for(survey.missing_tokens) + pool.chunks_for(_fresh_tokens(splice, survey) + 1)

    def _check_capacity(self, needed: int) -> None:
        pool = self._store.pool
        if needed > pool.chunks:
            raise CapacityError(
                f"the request needs {needed * pool.chunk_size} tokens of KV and the pool holds "
                f"{pool.chunks * pool.chunk_size}; give kv_memory at least "
                f"{needed * pool.chunk_size * pool.bytes_per_token / 2**20:.0f} MiB"
            )

    def _room(self, splice: Splice, survey: _Survey) -> tuple[tuple[Run, ...], tuple[Run, ...]] | None:
        """Slots for missing modules and for the open tail; None, and nothing evicted, where there is no room now."""
        pool = self._store.pool
        modules = pool.chunks_for(survey.missing_tokens) * pool.chunk_size
        try:
            room = self._store.allocate(modules + _fresh_tokens(splice, survey) + 1)
        except CapacityError:
            return None
        return cut(room, 0, modules), cut(room, modules, sum(run.length for run in room) - modules)


def _seat(splice: Splice, survey: _Survey, modules: tuple[Run, ...], tail: tuple[Run, ...], hold: Hold) -> Seat:
    """A splice as a seat: what it reads, and what it computes."""
    seat = Seat(modules=modules, tail=tail, hold=hold)
    encoded = _lay_modules(survey, modules, seat)
    for part, found in zip(splice, survey.beginnings, strict=True):
        if isinstance(part, Fresh):
            _lay_fresh(part, found, seat)
            continue
        spec, stored = survey.modules[part.spec.key]
        if stored is not None:
            seat.context += pieces(stored, part.start, part.length)
        else:
            seat.context += pieces_at(cut(encoded[spec.key], 0, part.length), spec.start, part.start - spec.start)
    return seat


def _lay_modules(survey: _Survey, slots: tuple[Run, ...], seat: Seat) -> dict[bytes, tuple[Run, ...]]:
    """Prefill work for missing modules, side by side; returns where each goes."""
    encoded: dict[bytes, tuple[Run, ...]] = {}
    at = 0
    for spec in survey.missing:
        encoded[spec.key] = cut(slots, at, len(spec.ids))
        at += len(spec.ids)
        context: tuple[Piece, ...] = ()
        for other in spec.context:
            stored = survey.modules[other.key][1]
            if stored is not None:
                context += pieces(stored, other.start, len(other.ids))
            else:
                context += pieces_at(encoded[other.key], other.start)
        run = spec.run
        work = Work(spec.ids, Span(spec.start, len(spec.ids), context, encoded[spec.key]))
        seat.prefill.append(Prefill(work, run, encoded[spec.key], run, module=True))
    return encoded


def _lay_fresh(part: Fresh, found: Found | None, seat: Seat) -> None:
    """A run of the request's own tokens: read what is stored of it, compute the rest."""
    done = 0 if found is None else found.tokens
    if found is not None and done:
        seat.context += pieces(found, part.start, done)
    slots = cut(seat.tail, seat.tokens, len(part.ids) - done)
    seat.last = _whole(part, found, slots)
    if done == len(part.ids):
        return
    start = part.start + done
    span = Span(start, len(part.ids) - done, seat.context, slots)
    keep, lies = seat.last or (None, ())
    pending = None if keep is None else keep.rest(done)
    seat.prefill.append(Prefill(Work(part.ids[done:], span), keep, lies, pending))
    seat.context += pieces_at(slots, start)
    seat.tokens += len(part.ids) - done


def _whole(part: Fresh, found: Found | None, slots: tuple[Run, ...]) -> tuple[TokenRun, tuple[Run, ...]] | None:
    """A run with all its slots, stored and own: what the store keeps, and what an answer carries on."""
    if part.run is None:
        return None
    stored = () if found is None else tuple(r for s, length in found.parts for r in cut(s.slots, 0, length))
    return part.run, stored + slots


def _fresh_tokens(splice: Splice, survey: _Survey) -> int:
    found = zip(splice, survey.beginnings, strict=True)
    return sum(len(part.ids) - (begun.tokens if begun else 0) for part, begun in found if isinstance(part, Fresh))


def _readable(splice: Splice) -> list[int]:
    """How many tokens of each fresh part may be read from the store: somebody has to compute the last logits."""
    lengths = [len(part.ids) if isinstance(part, Fresh) else 0 for part in splice]
    return [*lengths[:-1], lengths[-1] - 1]
