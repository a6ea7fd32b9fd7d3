"""Looks up requests and encodings in the store and allocates pool slots for the missing parts.

A request reads stored segments in their place. It computes the missing parts itself, modules first, in its own slots.
The store keeps each part once it is computed, so that other requests can reuse it.

``PendingPrefills``: a request with the same text as a running prefill waits, and then finds it stored. Otherwise it
would compute the same text again and store a second copy. ``AdmissionWaits``: looking up a long prompt takes time, so a
waiting task is looked up again when the stored contents change, not at every step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from inlay.engine.allocation import Prefill, SequenceAllocation, Wait, allocation_of
from inlay.engine.background.profiler import KnownProfiles
from inlay.engine.encoder import Encoding, Task
from inlay.engine.lookup import (
    Lookup,
    check_capacity,
    chunks_needed,
    count_misses,
    knows_last,
    look_up,
    look_up_modules,
    miss_reasons,
    tail_tokens,
    wanted_runs,
)
from inlay.engine.lower_tiers import LowerTiers, Prefetcher
from inlay.engine.order import OrderChooser
from inlay.engine.recurrent_state import begin_state, mark_prompt, schema_prefix
from inlay.engine.request import Request
from inlay.engine.retention import DerivedData, Retention
from inlay.engine.scheduler import Admission
from inlay.errors import CapacityError
from inlay.kv.choices import Kept
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.index import shared_length
from inlay.kv.offload.loader import Arrival
from inlay.kv.offload.residency import Residency
from inlay.kv.pool import PrefixMatch, Segment
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import CachedSpan, ComposedPrompt
from inlay.prompt.contexts import in_encoding_order
from inlay.slots import SlotRange, cut

#: The least number of tokens of another prefill that are worth waiting for.
_WORTH_WAITING = 16


class PendingPrefills:
    """The prefills of one store's requests and encodings that other tasks may wait for."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._by_first: dict[int, list[Prefill]] = {}  # by the first token that they compute

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def add(self, prefills: Iterable[Prefill]) -> None:
        """Let other tasks wait for these prefills, if the store is to keep their tokens."""
        for prefill in prefills:
            if prefill.pending is not None:
                self._by_first.setdefault(prefill.pending.ids[0], []).append(prefill)

    def remove(self, prefill: Prefill) -> None:
        """Remove a prefill, if it is known. Waits for it are over."""
        first = None if prefill.pending is None else prefill.pending.ids[0]
        if first is not None and prefill in self._by_first.get(first, ()):
            self._by_first[first].remove(prefill)
            if not self._by_first[first]:
                del self._by_first[first]

    def goes_on(self, wait: Wait) -> bool:
        """True if the prefill is still running and has not computed the tokens of the wait yet."""
        prefill, run = wait.prefill, wait.run
        still = prefill.pending is run and prefill.computed < wait.tokens
        return still and prefill in self._by_first.get(run.ids[0], ())

    def computing(self, run: TokenRun, done: int, most: int) -> Iterator[tuple[Prefill, int]]:
        """Yield (prefill, length of the shared text) for prefills that compute enough of a run's tokens behind
        ``done``.

        Args:
            done: the number of stored tokens of the run.
            most: the number of tokens of the run that are read in all.
        """
        if done >= most:
            return
        worth = min(_WORTH_WAITING, most - done)
        for at in sorted({0, done}):  # a prefill may have begun before these tokens were stored
            place = None
            for prefill in self._by_first.get(run.ids[at], ()):
                assert prefill.pending is not None, "what is computed for nobody else is not waited for"
                common = shared_length(prefill.pending.ids, run.ids, at, most)
                if at + common < done + worth:
                    continue
                place = place or self._store.place(run.rest(at))
                if self._store.place(prefill.pending) == place:
                    yield prefill, common


class AdmissionWaits:
    """The tasks that a KVCacheManager told to wait; see scheduler.Waits."""

    def __init__(self, store: SegmentStore, residency: Residency, pending: PendingPrefills) -> None:
        self._store = store
        self._residency = residency
        self._pending = pending
        self._numbers = count()
        self._coming: dict[Task, None] = {}
        self._seen: object = None  # the residency's version at the last check
        self._were_alone = True  # no task ran then
        # By prefill and run, the tasks that need the fewest tokens first.
        self._for_prefills: dict[tuple[Prefill, TokenRun], list[tuple[int, int, Task]]] = {}
        self._for_selection: dict[Task, None] = {}  # these wait for their prompt's token selection pass

    @property
    def room(self) -> object:
        """See Waits."""
        return self._residency.room_version, self._store.lent

    def begun(self, job: Task, answer: Admission) -> None:
        """See Waits."""
        if answer is Admission.COMING:
            self._coming[job] = None
        elif job.waits_for is None:
            self._for_selection[job] = None
        else:
            wait = job.waits_for
            heap = self._for_prefills.setdefault((wait.prefill, wait.run), [])
            heappush(heap, (wait.tokens, next(self._numbers), job))

    def over(self, alone: bool) -> Iterable[Task]:
        """See Waits."""
        found: list[Task] = []
        seen = self._residency.version
        if seen != self._seen or (alone and not self._were_alone):
            found += self._coming
            self._coming.clear()
        self._seen, self._were_alone = seen, alone
        for key, heap in list(self._for_prefills.items()):
            while heap and not self._goes_on(heap[0][2]):
                found.append(heappop(heap)[2])
            if not heap:
                del self._for_prefills[key]
        chosen = [task for task in self._for_selection if isinstance(task, Encoding) or task.prompt.selector is None]
        for task in chosen:
            del self._for_selection[task]
        return [*found, *chosen]

    def _goes_on(self, task: Task) -> bool:
        return task.waits_for is not None and self._pending.goes_on(task.waits_for)


logger = logging.getLogger(__name__)

#: The share of the pool, and of the slots for states, that encodings may hold while they compute. A single module with
#: its context may exceed it.
_ENCODING_SHARE = 1 / 8


class KVCacheManager:
    """Allocates slots of one store's pool to requests and encodings; the scheduler's memory.

    Args:
        residency: the tiers below the pool.
        kept: which segments these tiers may hold.
        pin_share: see Retention.
        state_interval: see mark_prompt.
        prefetch_likely: True to prefetch the segments that are likely to be read, too.
        profiles: the deviation profiles of modules. None for none.
        derived: see Retention. The profiles are added to them.

    Attributes:
        prefetcher: loads segments into the pool ahead of requests.
        retention: pins and lifetimes of segments, as set by callers.
        pending: the running prefills that other tasks may wait for.
        profiles: the deviation profiles of modules.
        orders: chooses the order of a prompt's free sets.
        encoding: the encoding that has slots; at most one at a time.
        encoded_tokens: the number of module tokens computed since the start.
        short_of_room: True if a task found no room in the last step.
    """

    def __init__(
        self,
        store: SegmentStore,
        residency: Residency,
        *,
        kept: Kept = Kept.SCHEMAS,
        pin_share: float = 0.25,
        state_interval: int = 0,
        prefetch_likely: bool = False,
        profiles: KnownProfiles | None = None,
        derived: Sequence[DerivedData] = (),
    ) -> None:
        self.profiles = KnownProfiles() if profiles is None else profiles
        self._store = store
        self._state_interval = state_interval
        self.residency = residency
        self._lower = LowerTiers(store, residency, kept=kept)
        self.prefetcher = Prefetcher(store, residency, self._lower, likely=prefetch_likely)
        derived = [*derived, self.profiles]
        self.retention = Retention(store, residency, kept=kept, pin_share=pin_share, derived=derived)
        self.pending = PendingPrefills(store)
        self._computing: dict[Prefill, Task] = {}
        self.orders = OrderChooser(store)
        self.encoding: Encoding | None = None
        self.encoded_tokens = 0
        self.short_of_room = False
        self.waits = AdmissionWaits(store, residency, self.pending)

    def admit(self, task: Task, alone: bool) -> Admission:
        """See scheduler.Memory."""
        self._store.purge()
        self.retention.expire()
        try:
            answer = self._admit_encoding(task) if isinstance(task, Encoding) else self._admit_request(task, alone)
        except BaseException:
            self.release(task)
            raise
        if answer is Admission.NO_ROOM:
            self.short_of_room = True
            # Slots that are moving between tiers or lent to idle work come back, so the task must not be refused.
            comes_back = self.residency.moving or self.residency.holding or self._store.lent
            return Admission.FREEING if comes_back else answer
        return answer

    def stored(self, specs: Iterable[SegmentSpec]) -> frozenset[bytes]:
        """Return the keys of the segments in ``specs`` that are in the pool or a lower tier, in any form."""
        return frozenset(spec.key for spec in specs if self._lower.is_at_hand(spec))

    def check(self, encoding: Encoding) -> None:
        """Raise CapacityError if the pool can never hold all modules of an encoding. Nothing is encoded then."""
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
        """Allocate room for the next batch. Only one encoding has room at a time, which bounds the total."""
        if self.encoding is not None:
            return Admission.TAKEN
        if self._still_waits(encoding):
            return Admission.LATER
        pool = self._store.pool
        states = self._store.states
        most = None if states is None else max(1, int(states.slots * _ENCODING_SHARE))
        batch = encoding.batch(self._lower.is_whole, int(pool.chunks * _ENCODING_SHARE) * pool.chunk_size, most)
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
        if chunks_needed(pool, (), lookup) > self._most_chunks(lookup):
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

    def _admit_request(self, request: Request, alone: bool) -> Admission:
        """Admit a request. Its composed prompt and usage are set at its first admission.

        A request that needs a pass for token selection is admitted for that pass first.

        Args:
            alone: see scheduler.Memory.
        """
        if self._still_waits(request) or request.prompt.selector is not None:
            return Admission.LATER
        since = time.perf_counter()
        if self._lower.is_sought(request, (spec for part in request.prompt.request.parts for spec in part.candidates)):
            request.wait_for(frozenset())
            return Admission.COMING
        request.prompt.choose(self._lower.at_hand, self._stored_tokens, self.profiles, self.orders, self._store)
        if any(self._store.get(spec) is None for spec in request.prompt.moved):
            request.prompt.compute_moved()  # it was preempted, and meanwhile its text was evicted
        composed = request.compose_now()
        prefix = self._prefix(request, composed)
        coming = None if prefix is None else self._lower.bring_prefix(prefix)
        if prefix is not None and coming is not None:
            request.wait_for(self.residency.bringing([prefix.key]))
            return coming
        lookup = look_up(self._store, composed)
        read = [part.spec for part in composed if isinstance(part, CachedSpan)]
        arrivals: tuple[Arrival, ...] = ()
        coming = self._lower.bring_up(read, lookup)
        if coming is not None:
            request.wait_for(self.residency.bringing(spec.key for spec, _ in lookup.missing))
            by_layer = self._lower.by_layer(read, lookup) if alone and _reads_by_layer(request) else None
            if by_layer is None:
                return coming
            lookup, arrivals = by_layer
        elif any(spec.source is not None for spec, _ in lookup.missing):
            # A form that no tier delivers is computed without its source. A preempted request computes it under the
            # form's name, which is at least as exact as that name says.
            request.prompt.choose(self._lower.in_pool, self._stored_tokens, self.profiles, self.orders, self._store)
            composed = request.compose_now()
            lookup = look_up(self._store, composed)
        if self._publish(composed, lookup):
            again = look_up(self._store, composed)
            lookup = replace(again, modules=lookup.modules) if arrivals else again
        if self._somebody_computes(request, composed, lookup):
            return Admission.LATER
        if chunks_needed(self._store.pool, composed, lookup) > self._most_chunks(lookup):
            # Stored segments may be scattered over more chunks than they fill. Recomputed tokens are contiguous.
            if request.prompt.moved:
                request.prompt.compute_moved()
                composed = request.compose_now()
            lookup, arrivals = look_up(self._store, composed, find=False), ()
            needed = chunks_needed(self._store.pool, composed, lookup)
            chooses = "" if request.prompt.selecting is None else ", with the pass that selects the recomputed tokens,"
            check_capacity(self._store.pool, needed, f"the request{chooses}", self._most_chunks(lookup))
        selecting = request.prompt.selecting is not None
        first = request.usage is None
        # Computed before the allocation, which may evict these segments.
        known = first and not selecting and knows_last(self._store, composed, lookup)
        misses = count_misses(self.residency, composed, lookup) if first else {}
        if first and request.prompt.request.diagnostics and not request.prefill.reasons:
            request.prefill.reasons = miss_reasons(self.residency, lookup)
        allocation = self._allocate(composed, lookup, request.adapter)
        if allocation is None:
            return Admission.NO_ROOM
        for spec in request.prompt.moved:
            origins = (segment.origin for segment in lookup.modules[spec.key][1].segments)
            request.prompt.follows(frozenset(key for each in origins if each is not None for key in each.modules))
        if allocation.state is not None:
            mark_prompt(allocation.state, request.prompt.request.parts, composed, lookup, self._state_interval)
        allocation.arrivals = arrivals
        allocation.arrived = tuple(run for arrival in arrivals for run in arrival.slots)
        self._store.pool.share(allocation.arrived)
        # Loading after the selecting pass does not count as queueing time.
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
            request.count(lookup.modules, lookup.prefixes, known, missed, self.residency.came_from, prefix)
            self._lower.write_used_again(request, lookup)
            self.retention.claim(request, prefix)
            self.prefetcher.admitted(request, [spec for spec in read if not spec.detached])
        return Admission.ADMITTED

    def _begin(self, task: Task, prefills: Sequence[Prefill]) -> None:
        self._computing.update(dict.fromkeys(prefills, task))
        self.pending.add(prefills)

    def _most_chunks(self, lookup: Lookup) -> int:
        """The number of chunks that a reader of these matches may hold. Other pins are excluded."""
        pool, pinned = self._store.pool, self.retention.pins.chunks
        if not pinned:
            return pool.chunks
        return pool.chunks - len(pinned.difference(*(pool.chunks_of(found.slots) for found in lookup.found)))

    def _allocate(self, composed: ComposedPrompt, lookup: Lookup, adapter: bytes) -> SequenceAllocation | None:
        """Allocate slots for a composed prompt. Returns None, and references nothing, if there is no room now.

        Args:
            adapter: see EngineRequest. Modules carry their own adapter.
        """
        with ExitStack() as undo:
            # the segments to read must not be evicted for the allocation
            hold = undo.enter_context(self._store.hold(*lookup.found))
            state = None
            if self._store.states is not None:
                state = begin_state(self._store.states, lookup, own=bool(composed))
                if state is None:
                    return None
                undo.callback(state.close)
            slots = self._room(composed, lookup)
            if slots is None:
                return None
            for own in slots:
                undo.callback(self._store.pool.free, own)
            allocation = allocation_of(composed, lookup, *slots, hold, adapter, state)
            undo.pop_all()
        self._store.read(*lookup.found)
        tokens = sum(found.tokens for found in lookup.found)
        if state is not None and composed and tokens:
            state.pool.hit(tokens)
        return allocation

    def grow(self, task: Task) -> bool:
        """See scheduler.Memory."""
        allocation = task.allocation
        if allocation.room > allocation.tokens:
            return True
        try:
            allocation.extend(self._store.allocate(1, after=allocation.tail[-1], urgent=True))
        except CapacityError:
            self.short_of_room = True
            return False
        return True

    def grow_ahead(self, request: Request, tokens: int) -> int:
        """Make room for draft tokens behind the next token, in free chunks only. Returns how many tokens have room."""
        allocation, pool = request.allocation, self._store.pool
        missing = tokens - (allocation.room - allocation.tokens - 1)
        if missing > 0 and pool.free_chunks:
            room = min(missing, pool.free_tokens)
            allocation.extend(self._store.allocate(room, after=allocation.tail[-1], urgent=True))
        return min(tokens, allocation.room - allocation.tokens - 1)

    def release(self, task: Task) -> None:
        """Take back a task's slots. Its computed KV stays in the store until the room is needed.

        A partly computed prompt is kept unless the request failed. A partly computed module is never kept.
        Nothing of a request with damaged logits is kept, because its KV may be damaged too.
        If keeping fails, the slots are freed anyway: keeping is only an optimization.
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
        """Insert the computed KV of a task's prompt and answer into the store."""
        for prefill in allocation.prefill:
            begun = None if task.error is not None or prefill.module else prefill.begun()
            if begun is not None:  # the tokens of a failed pass were never computed
                self._insert(task, *begun)
                self._keep_states(allocation, begun[0], last=True)
        if isinstance(task, Request):
            self._keep_answer(task, allocation)

    def _keep_states(
        self, allocation: SequenceAllocation, run: TokenRun, *, module: bool = False, last: bool = False
    ) -> None:
        """Store the recurrent states within a stored run.

        Args:
            module: True if the run is a module, with the state behind it.
            last: True if the task computes no further token, so that its own state is stored too.
        """
        if allocation.state is None:
            return
        if module and isinstance(run, SegmentSpec):
            allocation.state.store_module(self._store, run)
        else:
            allocation.state.store(self._store, run)
            if last:
                allocation.state.donate(self._store, run)

    def _give_back(self, task: Task, allocation: SequenceAllocation) -> None:
        self._store.pool.free(allocation.modules)
        self._store.pool.free(allocation.tail)
        self._store.pool.free(allocation.arrived)
        if allocation.state is not None:
            allocation.state.close(damaged=isinstance(task, Request) and task.damaged)
        suspect = self._own(allocation, allocation.hold.tokens) if isinstance(task, Request) and task.damaged else []
        allocation.hold.release()
        self._store.purge()
        if isinstance(task, Request) and task.damaged:
            for key in task.prefill.encoded:
                self.residency.forget(key)
        self._store.discard(suspect)

    def _keep_answer(self, request: Request, allocation: SequenceAllocation) -> None:
        # A failed pass has not computed the token that its requests count as computed ahead.
        said = tuple(request.token_ids[request.tokens_attached :])
        said = said if request.error is None else said[: allocation.decoded]
        kept = None if request.damaged else allocation.kept(said)
        if kept is not None and allocation.last is not None and self._is_stored(kept[0], len(allocation.last[0].ids)):
            self._insert(request, *kept)
            self._keep_states(allocation, kept[0], last=True)
        elif allocation.last is not None and not allocation.prefill and request.error is None:
            self._keep_states(allocation, allocation.last[0], last=True)

    def _insert(self, task: Task, run: TokenRun, slots: tuple[SlotRange, ...]) -> PrefixMatch:
        """Store a run that a task has computed, unless part of it was evicted after the task arrived."""
        if not self.retention.may_keep(task, run):
            return PrefixMatch(())
        if isinstance(task, Encoding) or isinstance(run, SegmentSpec):
            return self._store.insert(run, slots)
        return self._store.insert(run, slots, origin=task.prompt.origin(run.end))

    def _prefix(self, request: Request, composed: ComposedPrompt) -> SegmentSpec | None:
        """Return the prefix of a request that tiers below the pool may hold with its recurrent state. None for none."""
        if self._store.states is None or not self.residency.tiers or request.prompt.request.policy.reads_nothing:
            return None
        return schema_prefix(request.prompt.request.parts, composed, self._store.keys)

    def _own(self, allocation: SequenceAllocation, segments: Iterable[Segment]) -> set[Segment]:
        """The segments in the request's own chunks: the request computed them and the store kept them."""
        pool = self._store.pool
        own = allocation.chunks(pool)
        return {segment for segment in segments if own.issuperset(pool.chunks_of(segment.slots))}

    def computed(self, task: Task, prefill: Prefill) -> None:
        """Store a part of a task's prompt that is completely computed.

        The request reads its own slots and references only these. If the store has another copy, it may be evicted.
        """
        allocation = task.allocation
        allocation.prefill.remove(prefill)
        self._computing.pop(prefill, None)
        if prefill.module:
            self.encoded_tokens += 0 if prefill.pending is None else len(prefill.pending.ids)
        if prefill.keep is not None:
            self.pending.remove(prefill)
            kept = self._insert(task, prefill.keep, prefill.slots)
            self._keep_states(allocation, prefill.keep, module=prefill.module)
            prefix = self._prefix(task, task.compose_now()) if isinstance(task, Request) else None
            if prefix is not None:
                self._lower.write_prefix(prefix)
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
        """True if the first ``tokens`` tokens of a run are stored. Tokens after a missing prefix must not be stored."""
        return self._store.longest(run, most=tokens).tokens == tokens

    def _stored_tokens(self, run: TokenRun) -> int:
        """The length of a run's stored prefix that ends with its state if there are states, in tokens."""
        found = self._store.longest(run)
        return found.tokens if self._store.states is None else found.to_state().tokens

    def _somebody_computes(self, task: Task, composed: ComposedPrompt, lookup: Lookup) -> bool:
        for run, done, most in wanted_runs(composed, lookup):
            for prefill, common in self.pending.computing(run, done, most):
                if prefill.computed < common and prefill.pending is not None:
                    state = self._computing[prefill].allocation.state
                    if state is not None and not prefill.module:
                        state.mark(prefill.pending.before.tokens + common)
                    task.waits_for = Wait(prefill, prefill.pending, common)
                    return True
        return False

    def _still_waits(self, task: Task) -> bool:
        """True if the task still has to wait for KV that another task computes."""
        if task.waits_for is not None and not self.pending.goes_on(task.waits_for):
            task.waits_for = None
        return task.waits_for is not None

    def _publish(self, composed: ComposedPrompt, lookup: Lookup) -> bool:
        """Store the tokens that other tasks have computed so far and that this composed prompt shares.

        The request need not wait until these prompts are complete. Returns True if any tokens were shared.
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
                owner = self._computing[prefill]
                self._insert(owner, *begun)
                if not prefill.module:
                    self._keep_states(owner.allocation, begun[0])
                self.pending.remove(prefill)
                prefill.pending = prefill.keep.rest(len(begun[0].ids))
                self.pending.add([prefill])
        return bool(shared)

    def _room(
        self, composed: ComposedPrompt, lookup: Lookup
    ) -> tuple[tuple[SlotRange, ...], tuple[SlotRange, ...]] | None:
        """Allocate slots for missing modules and for the open tail. Returns None if there is no room now."""
        pool = self._store.pool
        modules = pool.chunks_for(lookup.missing_tokens) * pool.chunk_size
        try:
            room = self._store.allocate(modules + tail_tokens(composed, lookup))
        except CapacityError:
            return None
        return cut(room, 0, modules), cut(room, modules, sum(run.length for run in room) - modules)


def _reads_by_layer(request: Request) -> bool:
    """True if the request may read layers while they load: without prompt scores and without token selection."""
    return request.scores is None and request.embedding is None and request.prompt.selecting is None
