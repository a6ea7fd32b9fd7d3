"""Room for requests and encodings in the pool: what of them is stored, what is missing, and where that goes.

A request reads stored segments where they lie. What is missing becomes its own prefill work, modules first, in slots
that it owns; as soon as a part is computed the store keeps it, so that everybody else finds it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from inlay.attention.plan import Piece, Span, pieces_at
from inlay.engine.allocation import Prefill, Seat, Work, pieces
from inlay.engine.encoder import Encoding, Task
from inlay.engine.request import Request
from inlay.engine.scheduler import Admission
from inlay.errors import CapacityError
from inlay.kv.identity import Segment, SegmentSpec, TokenRun
from inlay.kv.index import Found, shared_length
from inlay.kv.pool import Run, cut
from inlay.kv.store import SegmentStore
from inlay.prompt.contexts import in_encoding_order
from inlay.prompt.splice import Cached, Fresh, Splice

#: So many tokens of what somebody else is computing are worth waiting for.
_WORTH_WAITING = 16

#: The part of the pool that encodings may hold while they compute; a single module, with its context, may hold more.
_ENCODING_SHARE = 1 / 8


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
    """Seats requests and encodings over one store; the scheduler's memory."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._pending: dict[int, list[Prefill]] = {}  # first token → what somebody is computing
        self._encoding: Encoding | None = None  # the one that has a seat

    def admit(self, task: Task) -> Admission:
        """See scheduler.Memory."""
        try:
            return self._admit_encoding(task) if isinstance(task, Encoding) else self._admit_request(task)
        except BaseException:
            self.release(task)  # what it was given before the fault
            raise

    def check(self, encoding: Encoding) -> None:
        """Raises CapacityError where the pool never holds all that is to be encoded, of which nothing is then."""
        pool = self._store.pool
        missing = [spec for spec in in_encoding_order(encoding.left.values()) if self._store.get(spec) is None]
        tokens = sum(len(spec.ids) for spec in missing)
        if pool.chunks_for(tokens) > pool.chunks:
            needed = pool.chunks_for(tokens) * pool.chunk_size * pool.bytes_per_token / 2**20
            raise CapacityError(
                f"{encoding.id} has {tokens} tokens to encode and the KV pool holds {pool.chunks * pool.chunk_size}; "
                f"give kv_memory at least {needed:.0f} MiB, or encode=False, which leaves each module to the first "
                "prompt that reads it"
            )

    def _admit_encoding(self, encoding: Encoding) -> Admission:
        """Room for the next batch. One encoding at a time has some, so that all of them together hold no more."""
        if self._encoding is not None:
            return Admission.LATER
        pool = self._store.pool
        batch = encoding.batch(self._is_whole, int(pool.chunks * _ENCODING_SHARE) * pool.chunk_size)
        if not batch:
            return Admission.DONE
        survey = self._survey_modules(batch)
        if self._somebody_computes((), survey):
            return Admission.LATER
        if self._chunks_needed((), survey) > pool.chunks:  # as below
            survey = self._survey_modules(batch, find=False)
            self._check_capacity(
                self._chunks_needed((), survey), f"a module of {encoding.id}, with what it attends to,"
            )
        if not self._take_room(encoding, (), survey):
            return Admission.NO_ROOM
        self._encoding = encoding
        return Admission.ADMITTED

    def _is_whole(self, spec: SegmentSpec) -> bool:
        return self._store.get(spec) is not None

    def _promise(self, prefills: Iterable[Prefill]) -> None:
        """Let others wait for what is computed here."""
        for prefill in prefills:
            if prefill.pending is not None:
                self._pending.setdefault(prefill.pending.ids[0], []).append(prefill)

    def _admit_request(self, request: Request) -> Admission:
        """The request's usage is that of its first admission."""
        since = time.perf_counter()
        splice = request.splice_now()
        survey = self._survey(splice)
        if self._publish(splice, survey):
            survey = self._survey(splice)
        if self._somebody_computes(splice, survey):
            return Admission.LATER
        if self._chunks_needed(splice, survey) > self._store.pool.chunks:
            # What is stored may lie scattered over more chunks than it fills; computed anew it lies side by side.
            survey = self._survey(splice, find=False)
            self._check_capacity(self._chunks_needed(splice, survey), "the request")
        known = request.seated is None and self._knows_last(splice, survey)
        if not self._take_room(request, splice, survey):
            return Admission.NO_ROOM
        if request.seated is None:
            request.count(survey.modules, survey.beginnings, known)
            request.fetch_s = time.perf_counter() - since
        request.sit(request.seat)
        return Admission.ADMITTED

    def _take_room(self, task: Task, splice: Splice, survey: _Survey) -> bool:
        """Fill a task's seat. Returns whether there is room; whatever it has by then is the seat's, to be released."""
        task.seat = Seat()
        task.seat.hold = self._store.hold(*survey.found)  # before room is made, which must not evict what is read
        slots = self._room(splice, survey)
        if slots is None:
            self.release(task)
            return False
        task.seat.modules, task.seat.tail = slots
        _lay(splice, survey, task.seat)
        self._promise(task.seat.prefill)
        return True

    def grow(self, task: Task) -> bool:
        """See scheduler.Memory."""
        seat = task.seat
        if seat.room > seat.tokens:
            return True
        try:
            seat.extend(self._store.allocate(1, after=seat.tail[-1]))
        except CapacityError:
            return False
        return True

    def release(self, task: Task) -> None:
        """Take back a request's slots; what it has computed stays in the store until others need the room.

        That is also a prompt that is computed in part, unless the request has failed. Of a module only the whole is of
        use. Nothing stays of a request whose logits were damaged: its keys and values may be, too.
        """
        seat = task.seat
        for prefill in seat.prefill:
            self._forget(prefill)
            begun = None if task.error is not None or prefill.module else prefill.begun()
            if begun is not None:  # a failed pass would have computed some of it, and did not
                self._store.insert(*begun)
        if isinstance(task, Request):
            self._release_answer(task)
        self._store.pool.free(seat.modules)
        self._store.pool.free(seat.tail)
        suspect = self._own(seat, seat.hold.tokens) if isinstance(task, Request) and task.damaged else []
        seat.hold.release()
        self._store.discard(suspect)
        task.seat = Seat()
        if task is self._encoding:
            self._encoding = None

    def _release_answer(self, request: Request) -> None:
        """Let the store keep what a request has said."""
        seat = request.seat
        kept = None if request.damaged else seat.kept(tuple(request.token_ids[request.seated_at :]))
        if kept is not None and self._is_stored(kept[0], len(kept[0].ids) - seat.decoded):
            self._store.insert(*kept)

    def _own(self, seat: Seat, segments: Iterable[Segment]) -> set[Segment]:
        """Those segments that lie in chunks of the seat's own: they were computed there, and kept by the store."""
        pool = self._store.pool
        own = set(pool.chunks_of(seat.modules + seat.tail))
        return {segment for segment in segments if own.issuperset(pool.chunks_of(segment.slots))}

    def computed(self, task: Task, prefill: Prefill) -> None:
        """Keep a part of a request's prompt, now that all of it is computed.

        The request reads it in its own slots, and holds just that: where another copy is stored already, that one may
        go.
        """
        seat = task.seat
        seat.prefill.remove(prefill)
        if prefill.keep is not None:
            self._forget(prefill)
            kept = self._store.insert(prefill.keep, prefill.slots)
            own = self._own(seat, kept.segments)
            for segment, tokens in kept.parts:
                if segment in own:
                    seat.hold.add(segment, tokens)
        if isinstance(task, Encoding):
            task.computed(prefill)
        elif prefill.module:
            task.encode_s = time.perf_counter() - seat.since

    def _is_stored(self, run: TokenRun, tokens: int) -> bool:
        """Whether a run's beginning is: what follows a beginning that has gone would be stored without it."""
        return self._store.longest(run, most=tokens).tokens == tokens

    def _forget(self, prefill: Prefill) -> None:
        """Promise it to nobody any more, if it was."""
        first = None if prefill.pending is None else prefill.pending.ids[0]
        if first is not None and prefill in self._pending.get(first, ()):
            self._pending[first].remove(prefill)
            if not self._pending[first]:
                del self._pending[first]

    def _survey(self, splice: Splice, *, find: bool = True) -> _Survey:
        """What is stored of a splice; nothing of it where ``find`` is False."""
        specs = [part.spec for part in splice if isinstance(part, Cached)]
        beginnings = [
            self._store.longest(part.run, most=most) if find and isinstance(part, Fresh) and part.run else None
            for part, most in zip(splice, _readable(splice), strict=True)
        ]
        return _Survey(self._survey_modules(specs, find=find).modules, tuple(beginnings))

    def _survey_modules(self, specs: Sequence[SegmentSpec], *, find: bool = True) -> _Survey:
        """What is stored of modules, and of what the missing ones attend to."""
        wanted = {spec.key for spec in specs}
        ordered = in_encoding_order(specs)
        modules = {spec.key: (spec, self._store.get(spec) if find else None) for spec in ordered}
        needed = {spec.key for spec in in_encoding_order(modules[key][0] for key in wanted if modules[key][1] is None)}
        return _Survey({key: entry for key, entry in modules.items() if key in wanted | needed}, ())

    def _knows_last(self, splice: Splice, survey: _Survey) -> bool:
        """Whether the KV of a prompt's last token is stored, and computed again for the logits behind it."""
        last, found = splice[-1], survey.beginnings[-1]
        if isinstance(last, Fresh) and last.run is not None:
            almost = found is not None and found.tokens == len(last.ids) - 1
            return almost and self._store.longest(last.run).tokens == len(last.ids)
        before = splice[-2] if len(splice) > 1 else None  # open_end took the last token of this module
        return isinstance(before, Cached) and survey.modules[before.spec.key][1] is not None

    def _somebody_computes(self, splice: Splice, survey: _Survey) -> bool:
        return any(
            prefill.computed < common
            for run, done, most in _wanted(splice, survey)
            for prefill, common in self._computing(run, done, most)
        )

    def _publish(self, splice: Splice, survey: _Survey) -> bool:
        """Keep what others have computed by now, where that is all that this splice shares with them.

        So nobody waits for the end of a prompt that goes on otherwise. Returns whether there was any.
        """
        shared = [
            prefill
            for run, done, most in _wanted(splice, survey)
            for prefill, common in self._computing(run, done, most)
            if prefill.computed >= common
        ]
        for prefill in shared:
            begun = prefill.begun()
            if begun is not None and prefill.keep is not None:
                self._store.insert(*begun)
                self._forget(prefill)
                prefill.pending = prefill.keep.rest(len(begun[0].ids))
                self._promise([prefill])
        return bool(shared)

    def _computing(self, run: TokenRun, done: int, most: int) -> Iterator[tuple[Prefill, int]]:
        """Who computes enough of a run's tokens from ``done`` on, and how many; ``most``: of how many, read in all."""
        if done >= most or run.ids[done] not in self._pending:
            return
        worth = min(_WORTH_WAITING, most - done)
        place = None
        for prefill in self._pending[run.ids[done]]:
            assert prefill.pending is not None, "what is computed for nobody else is not waited for"
            common = shared_length(prefill.pending.ids, run.ids, done, most)
            if common < worth:
                continue
            place = place or self._store.place(run.rest(done))
            if self._store.place(prefill.pending) == place:
                yield prefill, common

    def _chunks_needed(self, splice: Splice, survey: _Survey) -> int:
        """The chunks that it holds when it sits down, those of what it finds and those of its own."""
        pool = self._store.pool
        held = {chunk for found in survey.found for chunk in pool.chunks_of(found.slots)}
        return len(held) + pool.chunks_for(survey.missing_tokens) + pool.chunks_for(_tail_tokens(splice, survey))

    def _check_capacity(self, needed: int, who: str) -> None:
        pool = self._store.pool
        if needed > pool.chunks:
            raise CapacityError(
                f"{who} needs {needed * pool.chunk_size} tokens of KV and the pool holds "
                f"{pool.chunks * pool.chunk_size}; give kv_memory at least "
                f"{needed * pool.chunk_size * pool.bytes_per_token / 2**20:.0f} MiB"
            )

    def _room(self, splice: Splice, survey: _Survey) -> tuple[tuple[Run, ...], tuple[Run, ...]] | None:
        """Slots for missing modules and for the open tail; None, and nothing evicted, where there is no room now."""
        pool = self._store.pool
        modules = pool.chunks_for(survey.missing_tokens) * pool.chunk_size
        try:
            room = self._store.allocate(modules + _tail_tokens(splice, survey))
        except CapacityError:
            return None
        return cut(room, 0, modules), cut(room, modules, sum(run.length for run in room) - modules)


def _lay(splice: Splice, survey: _Survey, seat: Seat) -> None:
    """Note in a seat that has its slots what of a splice it reads, and what it computes."""
    encoded = _lay_modules(survey, seat.modules, seat)
    for part, found in zip(splice, survey.beginnings, strict=True):
        if isinstance(part, Fresh):
            _lay_fresh(part, found, seat)
            continue
        spec, stored = survey.modules[part.spec.key]
        if stored is not None:
            seat.context += pieces(stored, part.start, part.length)
        else:
            seat.context += pieces_at(cut(encoded[spec.key], 0, part.length), spec.start, part.start - spec.start)


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
        seat.prefill.append(Prefill(work, run, encoded[spec.key], run, spec.key))
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
    return part.run, (() if found is None else found.slots) + slots


def _tail_tokens(splice: Splice, survey: _Survey) -> int:
    """What a request computes of its own text, and its next token; an encoding has neither."""
    found = zip(splice, survey.beginnings, strict=True)
    own = [len(part.ids) - (begun.tokens if begun else 0) for part, begun in found if isinstance(part, Fresh)]
    return sum(own) + 1 if own else 0


def _wanted(splice: Splice, survey: _Survey) -> Iterator[tuple[TokenRun, int, int]]:
    """What is read and not stored, as runs: with how many of their tokens are stored, and how many are read."""
    for spec in survey.missing:
        yield spec.run, 0, len(spec.ids)
    for part, found, most in zip(splice, survey.beginnings, _readable(splice), strict=True):
        if isinstance(part, Fresh) and part.run is not None and found is not None:
            yield part.run, found.tokens, most


def _readable(splice: Splice) -> list[int]:
    """How many tokens of each fresh part may be read from the store: somebody has to compute the last logits."""
    lengths = [len(part.ids) if isinstance(part, Fresh) else 0 for part in splice]
    return [*lengths[:-1], lengths[-1] - 1] if lengths else []
