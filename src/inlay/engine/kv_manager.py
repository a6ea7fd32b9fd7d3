"""Room for requests and encodings in the pool: what of them is stored, what is missing, and where that goes.

A request reads stored segments where they lie. What is missing becomes its own prefill work, modules first, in slots
that it owns; as soon as a part is computed the store keeps it, so that everybody else finds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from inlay.engine.allocation import Prefill, SequenceAllocation, allocation_of
from inlay.engine.background.profiles import KnownProfiles
from inlay.engine.encoder import Encoding, Task
from inlay.engine.jobs import Admission
from inlay.engine.lookup import (
    Lookup,
    check_capacity,
    chunks_needed,
    count_misses,
    knows_last,
    look_up,
    look_up_modules,
    tail_tokens,
    wanted_runs,
)
from inlay.engine.lower_tiers import LowerTiers
from inlay.engine.order import OrderChooser
from inlay.engine.pending import PendingPrefills, Wait
from inlay.engine.prefetch import Prefetcher
from inlay.engine.request import Request
from inlay.engine.retention import Retention
from inlay.engine.waits import AdmissionWaits
from inlay.errors import CapacityError
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.offload.arrivals import Arrival
from inlay.kv.offload.residency import Residency
from inlay.kv.offload.tier import Kept
from inlay.kv.segment import PrefixMatch, Segment
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import CachedSpan, ComposedPrompt
from inlay.prompt.contexts import in_encoding_order
from inlay.slots import SlotRange, cut

logger = logging.getLogger(__name__)

#: The part of the pool that encodings may hold while they compute; a single module, with its context, may hold more.
_ENCODING_SHARE = 1 / 8


class KVCacheManager:
    """Gives requests and encodings their place in the pool of one store; the scheduler's memory.

    residency: the tiers below the pool. kept: which segments they may hold.

    pending: what they compute that others may wait for. profiles: how much tokens of modules move.
    orders: chooses the orders that prompts leave free.
    encoding: the one that has slots, as only one has at a time.
    encoded_tokens: how many tokens of modules were computed since the start. retention: what stays, and what goes,
    because somebody said so; pin_share: see there. prefetcher: brings up what will be read; prefetch_likely: also what
    is likely to be. short_of_room: whether a task found no room in the last step.
    alone: whether who is admitted now may wait in its pass, for what comes up layer by layer: others there would, too.
    """

    def __init__(
        self,
        store: SegmentStore,
        residency: Residency,
        *,
        kept: Kept = Kept.SCHEMAS,
        pin_share: float = 0.25,
        prefetch_likely: bool = False,
    ) -> None:
        self._store = store
        self.residency = residency
        self._lower = LowerTiers(store, residency, kept=kept)
        self.prefetcher = Prefetcher(store, residency, self._lower, likely=prefetch_likely)
        self.retention = Retention(store, residency, kept=kept, pin_share=pin_share)
        self.pending = PendingPrefills(store)
        self._computing: dict[Prefill, Task] = {}
        self.profiles = KnownProfiles()
        self.orders = OrderChooser(store)
        self.encoding: Encoding | None = None
        self.encoded_tokens = 0
        self.short_of_room = False
        self.alone: Callable[[], bool] = _never
        self.waits = AdmissionWaits(store, residency, self.pending, lambda: self.alone())

    def when_over(self, listener: Callable[[frozenset[bytes]], None]) -> None:
        """Have somebody told of the segments whose time is over, or that are evicted, by their keys."""
        self.retention.over = listener

    def admit(self, task: Task) -> Admission:
        """See jobs.Memory."""
        self._store.purge()
        self.retention.expire()
        try:
            answer = self._admit_encoding(task) if isinstance(task, Encoding) else self._admit_request(task)
        except BaseException:
            self.release(task)  # what it was given before the fault
            raise
        if answer is Admission.NO_ROOM:
            self.short_of_room = True
            # What is on its way, or lent to idle work, comes back: no task is turned away for lack of that.
            comes_back = self.residency.moving or self.residency.holding or self._store.lent
            return Admission.FREEING if comes_back else answer
        return answer

    def stored(self, specs: Iterable[SegmentSpec]) -> frozenset[bytes]:
        """The keys of those segments that are stored, in whatever form."""
        return frozenset(spec.key for spec in specs if self._lower.is_whole(spec))

    def check(self, encoding: Encoding) -> None:
        """Raises CapacityError where the pool never holds all that is to be encoded, of which nothing is then."""
        pool = self._store.pool
        missing = [spec for spec in in_encoding_order(encoding.left.values()) if self._store.get(spec) is None]
        tokens = sum(len(spec.ids) for spec in missing)
        if pool.chunks_for(tokens) > pool.chunks - len(self.retention.pins.chunks):
            raise CapacityError(
                f"{encoding.name} has {tokens} tokens to encode and the KV pool holds {pool.chunks * pool.chunk_size}; "
                f"give kv_memory at least {pool.mib_for(tokens)} MiB, or encode=False, which leaves each module to the "
                "first prompt that reads it"
            )

    def _admit_encoding(self, encoding: Encoding) -> Admission:
        """Room for the next batch. One encoding at a time has some, so that all of them together hold no more."""
        if self.encoding is not None:
            return Admission.TAKEN
        if self._still_waits(encoding):
            return Admission.LATER
        pool = self._store.pool
        batch = encoding.batch(self._lower.is_whole, int(pool.chunks * _ENCODING_SHARE) * pool.chunk_size)
        if not batch:
            self.retention.claim_encoded(encoding)
            return Admission.DONE
        if self._lower.is_sought(encoding, (form for spec in batch for form in self.residency.forms(spec))):
            return Admission.COMING
        nearest = [self._lower.nearest(spec) for spec in batch]
        coming = self._lower.bring_up(nearest, look_up_modules(self._store, nearest))
        if coming is not None:
            return coming
        lookup = look_up_modules(self._store, batch)
        if self._somebody_computes(encoding, (), lookup):
            return Admission.LATER
        if chunks_needed(pool, (), lookup) > self._most_chunks(lookup):  # as below
            lookup = look_up_modules(self._store, batch, find=False)
            who = f"a module of {encoding.name}, with what it attends to,"
            check_capacity(pool, chunks_needed(pool, (), lookup), who, self._most_chunks(lookup))
        allocation = self._allocate((), lookup, b"")
        if allocation is None:
            return Admission.NO_ROOM
        encoding.allocation = allocation
        self._begin(encoding, allocation.prefill)
        self.encoding = encoding
        return Admission.ADMITTED

    def _admit_request(self, request: Request) -> Admission:
        """The request's splice and its usage are those of its first admission.

        Where a pass has to choose what is computed anew of its modules, it is admitted for that before.
        """
        if self._still_waits(request) or request.prompt.selector is not None:
            return Admission.LATER
        since = time.perf_counter()
        if self._lower.is_sought(request, (spec for part in request.prompt.request.parts for spec in part.candidates)):
            request.wait_for(frozenset())
            return Admission.COMING
        request.prompt.choose(self._lower.at_hand, self._stored_tokens, self.profiles, self.orders)
        composed = request.compose_now()
        lookup = look_up(self._store, composed)
        read = [part.spec for part in composed if isinstance(part, CachedSpan)]
        arrivals: tuple[Arrival, ...] = ()
        coming = self._lower.bring_up(read, lookup)
        if coming is not None:
            request.wait_for(self.residency.bringing(spec.key for spec, _ in lookup.missing))
            by_layer = self._lower.by_layer(read, lookup) if self._may_wait_in_pass(request) else None
            if by_layer is None:
                return coming
            lookup, arrivals = by_layer
        elif any(spec.source is not None for spec, _ in lookup.missing):
            # What does not come up is computed as it is. A prompt that has begun to answer computes it under the name
            # of the form that it has read: that is no less exact than the name says.
            request.prompt.choose(self._lower.in_pool, self._stored_tokens, self.profiles, self.orders)
            composed = request.compose_now()
            lookup = look_up(self._store, composed)
        if self._publish(composed, lookup):
            again = look_up(self._store, composed)
            lookup = replace(again, modules=lookup.modules) if arrivals else again
        if self._somebody_computes(request, composed, lookup):
            return Admission.LATER
        if chunks_needed(self._store.pool, composed, lookup) > self._most_chunks(lookup):
            # What is stored may lie scattered over more chunks than it fills; computed anew it lies side by side.
            lookup, arrivals = look_up(self._store, composed, find=False), ()
            needed = chunks_needed(self._store.pool, composed, lookup)
            chooses = "" if request.prompt.selecting is None else ", with the pass that chooses what of it is repaired,"
            check_capacity(self._store.pool, needed, f"the request{chooses}", self._most_chunks(lookup))
        selecting = request.prompt.selecting is not None
        first = request.usage is None
        # Before room is made, for which that may go.
        known = first and not selecting and knows_last(self._store, composed, lookup)
        misses = count_misses(self.residency, composed, lookup) if first else {}
        allocation = self._allocate(composed, lookup, request.adapter)
        if allocation is None:
            return Admission.NO_ROOM
        allocation.arrivals = arrivals
        allocation.arrived = tuple(run for arrival in arrivals for run in arrival.slots)
        self._store.pool.share(allocation.arrived)
        # What is fetched behind a pass that chooses a repair is no part of the wait for a place.
        if request.prefill.admitted_at is None:
            request.prefill.fetch_s = time.perf_counter() - since + request.prefill.waited_s
        request.attach(allocation)
        self._begin(request, allocation.prefill)
        if selecting:
            request.begin_selecting(lookup, misses)
        elif first:
            if request.leader is None:
                self.orders.asked(request.prompt.request)
            missed = request.prefill.misses or misses
            request.count(lookup.modules, lookup.prefixes, known, missed, self.residency.came_from)
            self._lower.write_used_again(request, lookup)
            self.retention.claim(request)
            self.prefetcher.admitted(request, read)
        return Admission.ADMITTED

    def _begin(self, task: Task, prefills: Sequence[Prefill]) -> None:
        self._computing.update(dict.fromkeys(prefills, task))
        self.pending.add(prefills)

    def _may_wait_in_pass(self, request: Request) -> bool:
        """Whether a request may read what comes up layer by layer: where it waits alone, for nothing but a token."""
        return self.alone() and request.scores is None and request.prompt.selecting is None

    def _most_chunks(self, lookup: Lookup) -> int:
        """How many chunks somebody may hold who reads what was found: not those of others' pins."""
        pool, pinned = self._store.pool, self.retention.pins.chunks
        if not pinned:
            return pool.chunks
        return pool.chunks - len(pinned.difference(*(pool.chunks_of(found.slots) for found in lookup.found)))

    def _allocate(self, composed: ComposedPrompt, lookup: Lookup, adapter: bytes) -> SequenceAllocation | None:
        """What a splice takes of the pool; None where there is no room now, and then nothing is held.

        adapter: see EngineRequest; modules say themselves what they are made with.
        """
        with ExitStack() as undo:
            hold = undo.enter_context(self._store.hold(*lookup.found))  # what is read must not be evicted for room
            slots = self._room(composed, lookup)
            if slots is None:
                return None
            for own in slots:
                undo.callback(self._store.pool.free, own)
            allocation = allocation_of(composed, lookup, *slots, hold, adapter)
            undo.pop_all()
        self._store.read(*lookup.found)
        return allocation

    def grow(self, task: Task) -> bool:
        """See jobs.Memory."""
        allocation = task.allocation
        if allocation.room > allocation.tokens:
            return True
        try:
            allocation.extend(self._store.allocate(1, after=allocation.tail[-1], urgent=True))
        except CapacityError:
            self.short_of_room = True
            return False
        return True

    def release(self, task: Task) -> None:
        """Take back a request's slots; what it has computed stays in the store until others need the room.

        That is also a prompt that is computed in part, unless the request has failed; a module stays as a whole alone.
        Nothing stays of a request whose logits were damaged: its keys and values may be, too. Where keeping fails, its
        slots come back all the same: it was to save others work, and nobody waits for it.
        """
        allocation, task.allocation = task.allocation, SequenceAllocation()
        if isinstance(task, Request):
            task.end_selecting()
        if task is self.encoding:
            self.encoding = None
        if isinstance(task, Encoding):
            self.retention.claim_encoded(task)
        for prefill in allocation.prefill:
            self.pending.remove(prefill)
            self._computing.pop(prefill, None)
        try:
            if not any(arrival.failed for arrival in allocation.arrivals):
                self._keep(task, allocation)
        except Exception:
            logger.exception("what request %s has computed could not be kept", task.id)
        finally:
            self._give_back(task, allocation)

    def _keep(self, task: Task, allocation: SequenceAllocation) -> None:
        """Let the store keep what a task has computed of its prompt, and said."""
        for prefill in allocation.prefill:
            begun = None if task.error is not None or prefill.module else prefill.begun()
            if begun is not None:  # a failed pass would have computed some of it, and did not
                self._insert(task, *begun)
        if isinstance(task, Request):
            self._keep_answer(task, allocation)

    def _give_back(self, task: Task, allocation: SequenceAllocation) -> None:
        self._store.pool.free(allocation.modules)
        self._store.pool.free(allocation.tail)
        self._store.pool.free(allocation.arrived)
        suspect = self._own(allocation, allocation.hold.tokens) if isinstance(task, Request) and task.damaged else []
        allocation.hold.release()
        self._store.purge()
        if isinstance(task, Request) and task.damaged:
            for key in task.prefill.encoded:
                self.residency.forget(key)
        self._store.discard(suspect)

    def _keep_answer(self, request: Request, allocation: SequenceAllocation) -> None:
        kept = None if request.damaged else allocation.kept(tuple(request.token_ids[request.tokens_attached :]))
        if kept is not None and self._is_stored(kept[0], len(kept[0].ids) - allocation.decoded):
            self._insert(request, *kept)

    def _insert(self, task: Task, run: TokenRun, slots: tuple[SlotRange, ...]) -> PrefixMatch:
        """Keep a run that a task has computed, unless some of it was evicted since the task was sent."""
        if not self.retention.may_keep(task, run):
            return PrefixMatch(())
        if isinstance(task, Encoding) or isinstance(run, SegmentSpec):
            return self._store.insert(run, slots)
        return self._store.insert(run, slots, origin=task.prompt.origin(run.end))

    def _own(self, allocation: SequenceAllocation, segments: Iterable[Segment]) -> set[Segment]:
        """Those segments that lie in chunks of the request's own: they were computed there, and kept by the store."""
        pool = self._store.pool
        own = allocation.chunks(pool)
        return {segment for segment in segments if own.issuperset(pool.chunks_of(segment.slots))}

    def computed(self, task: Task, prefill: Prefill) -> None:
        """Keep a part of a request's prompt, now that all of it is computed.

        The request reads it in its own slots, and holds just that: where another copy is stored already, that one may
        go.
        """
        allocation = task.allocation
        allocation.prefill.remove(prefill)
        self._computing.pop(prefill, None)
        if prefill.module:
            self.encoded_tokens += 0 if prefill.pending is None else len(prefill.pending.ids)
        if prefill.keep is not None:
            self.pending.remove(prefill)
            kept = self._insert(task, prefill.keep, prefill.slots)
            if kept.ranges:
                self._lower.write_behind(task, prefill.keep)
            if kept.ranges and isinstance(prefill.keep, SegmentSpec):
                self.retention.pins.stored(prefill.keep)
            own = self._own(allocation, kept.segments)
            for each in kept.ranges:
                if each.segment in own:
                    allocation.hold.add(each.segment, each.end)
        if isinstance(task, Encoding):
            task.computed(prefill)
        elif prefill.module:
            task.prefill.encode_s = time.perf_counter() - allocation.since

    def _is_stored(self, run: TokenRun, tokens: int) -> bool:
        """Whether a run's beginning is: what follows a beginning that has gone would be stored without it."""
        return self._store.longest(run, most=tokens).tokens == tokens

    def _stored_tokens(self, run: TokenRun) -> int:
        """How many of a run's tokens are, from the first on."""
        return self._store.longest(run).tokens

    def _somebody_computes(self, task: Task, composed: ComposedPrompt, lookup: Lookup) -> bool:
        for run, done, most in wanted_runs(composed, lookup):
            for prefill, common in self.pending.computing(run, done, most):
                if prefill.computed < common and prefill.pending is not None:
                    task.waits_for = Wait(prefill, prefill.pending, common)
                    return True
        return False

    def _still_waits(self, task: Task) -> bool:
        """Whether what a task was told to wait for goes on."""
        if task.waits_for is not None and not self.pending.goes_on(task.waits_for):
            task.waits_for = None
        return task.waits_for is not None

    def _publish(self, composed: ComposedPrompt, lookup: Lookup) -> bool:
        """Keep what others have computed by now, where that is all that this splice shares with them.

        So nobody waits for the end of a prompt that goes on otherwise. Returns whether there was any.
        """
        shared = [
            prefill
            for run, done, most in wanted_runs(composed, lookup)
            for prefill, common in self.pending.computing(run, done, most)
            if prefill.computed >= common
        ]
        for prefill in shared:
            begun = prefill.begun()
            if begun is not None and prefill.keep is not None:
                self._insert(self._computing[prefill], *begun)
                self.pending.remove(prefill)
                prefill.pending = prefill.keep.rest(len(begun[0].ids))
                self.pending.add([prefill])
        return bool(shared)

    def _room(
        self, composed: ComposedPrompt, lookup: Lookup
    ) -> tuple[tuple[SlotRange, ...], tuple[SlotRange, ...]] | None:
        """Slots for missing modules and for the open tail; None where there is no room now."""
        pool = self._store.pool
        modules = pool.chunks_for(lookup.missing_tokens) * pool.chunk_size
        try:
            room = self._store.allocate(modules + tail_tokens(composed, lookup))
        except CapacityError:
            return None
        return cut(room, 0, modules), cut(room, modules, sum(run.length for run in room) - modules)


def _never() -> bool:
    """Whoever waits for a lower tier does so before it is admitted."""
    return False
