"""The engine: requests come in, tokens go out, and each step runs one forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from inlay.engine.background.forced_runs import ShadowSampler
from inlay.engine.background.idle import IdleTime, IdleWorker
from inlay.engine.background.policy_meter import PolicyMeter
from inlay.engine.background.profiler import Profiler
from inlay.engine.background.promoter import Promoter
from inlay.engine.encoder import Encoding, Task
from inlay.engine.forward import ForwardPass, InFlight, PassPlans, StepObserver
from inlay.engine.kv_manager import KVCacheManager
from inlay.engine.pass_cost import PassBudget
from inlay.engine.request import Request, most_rows
from inlay.engine.runner import Runner
from inlay.engine.scheduler import Scheduler, Step
from inlay.engine.speculator import Draft, Speculator, counts
from inlay.errors import AbortedError, DeadlineError, DeviceMemoryError, InlayError, QueueFullError
from inlay.kv.choices import Kept
from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.residency import Residency
from inlay.kv.store import SegmentStore
from inlay.sampling.sampler import begin
from inlay.types import EngineStats


def fault_of(error: BaseException) -> Exception:
    """The error to report to a waiting caller.

    A BaseException, such as a panic in a library written in Rust, would end the caller's thread; it becomes a
    RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()  # frees the memory of the failed pass; no effect without a device
        out = DeviceMemoryError(
            "the device had no memory left for this pass; set a smaller kv_memory or max_num_batched_tokens"
        )
        out.__cause__ = error
        return out
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run between two steps. ``fail`` is called with the reason instead of ``do``, or after ``do`` has
    raised.
    """

    do: Callable[[], None]
    fail: Callable[[Exception], None]


class Inbox:
    """A queue of commands that can be closed: every command runs or fails.

    ``put`` and ``check_open`` take no lock and never block, so a finalizer may call them.

    Args:
        interruptible: raise KeyboardInterrupt and the like again after failing the command that caused it.
    """

    def __init__(self, *, interruptible: bool) -> None:
        self._interruptible = interruptible
        self._queue: SimpleQueue[Command] = SimpleQueue()  # its put is reentrant
        self._refusal: Callable[[], InlayError] | None = None
        self.closed = False

    @property
    def waiting(self) -> bool:
        """True if commands are queued."""
        return not self._queue.empty()

    def check_open(self) -> None:
        """Raise InlayError, with the reason, if no more commands are accepted."""
        if self._refusal is not None:
            raise self._refusal()

    def put(self, command: Command) -> None:
        """Queue a command. Fails it at once after close."""
        self._queue.put(command)
        if self.closed:  # it may have closed after the caller's check, and close() does not look again
            assert self._refusal is not None, "it is closed for a reason"
            self._fail_all(self._refusal())

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a command, at most ``timeout`` seconds, and run it. For a thread that does nothing else."""
        try:
            command = self._queue.get(timeout=timeout)
        except Empty:
            return
        self._carry_out(command)

    def carry_out(self) -> None:
        """Run all queued commands."""
        with suppress(Empty):
            while True:
                self._carry_out(self._queue.get_nowait())

    def refuse(self, refusal: Callable[[], InlayError]) -> None:
        """Accept no more commands. ``refusal`` makes the error of ``check_open``."""
        self._refusal = refusal

    def close(self, error: InlayError) -> None:
        """Run no more commands; the queued ones fail with this error. Call ``refuse`` first."""
        self.closed = True
        self._fail_all(error)

    def _carry_out(self, command: Command) -> None:
        try:
            command.do()
        except BaseException as error:
            command.fail(fault_of(error))
            if self._interruptible and not isinstance(error, Exception):
                raise

    def _fail_all(self, error: InlayError) -> None:
        with suppress(Empty):
            while True:
                self._queue.get_nowait().fail(error)


class EngineCore:
    """Runs requests over one store of segments.

    Args:
        max_requests, max_tokens, prefill_chunk, max_waiting: see Scheduler.
        max_pass_s: see PassBudget.
        profiler: computes deviation profiles in idle time. None to compute none.
        promoter: encodes repeated prefixes in idle time. None to encode none.
        shadow: compares answers with full prefill in idle time. None to compare none.
        speculator: makes drafts of answers. None for one token a pass.
        meter: compares recomputations on requests in idle time. None to compare none.
        residency: see KVCacheManager. None for no tiers below the pool.
        kept, pin_share, state_interval, prefetch_likely: see KVCacheManager.

    Attributes:
        observers: called for every step that computes something.
    """

    def __init__(
        self,
        store: SegmentStore,
        runner: Runner,
        *,
        max_requests: int,
        max_tokens: int,
        prefill_chunk: int,
        max_waiting: int | None = None,
        max_pass_s: float | None = None,
        profiler: Profiler | None = None,
        promoter: Promoter | None = None,
        shadow: ShadowSampler | None = None,
        speculator: Speculator | None = None,
        meter: PolicyMeter | None = None,
        residency: Residency | None = None,
        kept: Kept = Kept.SCHEMAS,
        pin_share: float = 0.25,
        state_interval: int = 0,
        prefetch_likely: bool = False,
    ) -> None:
        self.store = store
        self.runner = runner
        self._max_tokens = max_tokens
        self._budget = PassBudget(max_pass_s)
        self.residency = residency or Residency(store, runner.storage)
        earlier = None if speculator is None else speculator.earlier
        self.kv_manager = KVCacheManager(
            store,
            self.residency,
            kept=kept,
            pin_share=pin_share,
            state_interval=state_interval,
            prefetch_likely=prefetch_likely,
            profiles=None if profiler is None else profiler.profiles,
            derived=[each for each in (promoter, profiler, shadow, meter, earlier) if each is not None],
        )
        self.profiler = profiler
        self.promoter = promoter
        self.shadow = shadow
        self.speculator = speculator
        self.meter = meter
        self._idle_time = IdleTime((profiler, promoter, shadow, meter), self._budget, max_tokens)
        self.scheduler: Scheduler[Task] = Scheduler(
            max_requests, max_tokens, prefill_chunk, max_waiting, self.kv_manager, self.kv_manager.waits
        )
        self.observers: list[StepObserver] = []
        self._plans = PassPlans()
        self._scoring: set[Task] = set()  # queued or running tasks whose prompts still need log-probabilities
        self._in_flight: InFlight | None = None  # tokens of the last step that only the device knows
        self._steps = self._preemptions = 0
        self._idle = False  # True if the last step had nothing to do

    def stats(self) -> EngineStats:
        """The engine's current state. Thread-safe."""
        running, pool, states = list(self.scheduler.running), self.store.pool, self.store.states
        held: set[int] = set()
        for task in running:
            allocation = task.allocation
            for slots in (allocation.modules, allocation.tail, *allocation.hold.slots()):
                held.update(pool.chunks_of(slots))
        return EngineStats(
            running=sum(isinstance(task, Request) for task in running),
            waiting=sum(isinstance(task, Request) for task in list(self.scheduler.waiting)),
            chunks=pool.chunks,
            used_chunks=pool.chunks - pool.free_chunks,
            held_chunks=len(held),
            segments=len(self.store),
            stored_tokens=self.store.tokens,
            steps=self._steps,
            preemptions=self._preemptions,
            busy=self.busy,
            profiled_tokens=0 if self.profiler is None else self.profiler.tokens,
            profile_s=0.0 if self.profiler is None else self.profiler.seconds,
            promoted_tokens=0 if self.promoter is None else self.promoter.tokens,
            promotion_s=0.0 if self.promoter is None else self.promoter.seconds,
            encoded_tokens=self.kv_manager.encoded_tokens,
            rows_saved=self.runner.rows_saved,
            pinned_bytes=self.kv_manager.retention.pins.bytes,
            host_tokens=self.residency.loaded.get("host", 0),
            disk_tokens=self.residency.loaded.get("disk", 0),
            shared_tokens=self.residency.loaded.get("shared", 0),
            unwritten_segments=self.residency.waiting,
            write_lag_s=self.residency.lag_s,
            host=self.residency.stats_of("host"),
            disk=self.residency.stats_of("disk"),
            shared=self.residency.stats_of("shared"),
            shadow=None if self.shadow is None else self.shadow.stats(),
            drafted_tokens=() if self.speculator is None else counts(self.speculator.drafted),
            accepted_tokens=() if self.speculator is None else counts(self.speculator.accepted),
            states=0 if states is None else states.stored,
            state_slots=0 if states is None else states.slots,
            used_state_slots=0 if states is None else states.used_slots,
            state_bytes=0 if states is None else states.slots * states.slot_bytes,
            state_hits=0 if states is None else states.hits,
            state_hit_tokens=0 if states is None else states.hit_tokens,
            state_evictions=0 if states is None else states.evicted,
            token_s=self._budget.token_s,
        )

    def add(self, task: Task) -> None:
        """Queue a request with its followers, or an encoding.

        Raises QueueFullError, and CapacityError for an encoding larger than the pool. Nothing is queued then.
        """
        if isinstance(task, Encoding):
            self.kv_manager.check(task)
        try:
            for member in task.family:
                self.scheduler.add(member)
        except QueueFullError:
            for member in task.family:
                self.scheduler.remove(member)
            raise
        if isinstance(task, Request) and task.needs_all_rows:
            self._scoring.add(task)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def stalled(self) -> bool:
        """True if in the last step all tasks waited for a lower tier."""
        return self._idle and self.busy and (self.residency.moving or self.residency.holding)

    def step(self, *, on_leave: Callable[[Task], None] | None = None, interruptible: bool = True) -> list[Task]:
        """Schedule, run one forward pass, and sample.

        Args:
            on_leave: called with each task that ends before the pass, so that its caller need not wait for the pass.
            interruptible: True to raise KeyboardInterrupt and SystemExit again, after the requests of the pass have
                ended.
                False on a dedicated thread, where these count as ordinary faults.

        Returns:
            The requests with a new token, the encodings that advanced, and the tasks that ended.
        """
        self.poll()
        due = self._idle_time.due and bool(self.scheduler.running)
        self._idle_time.give_up(wanted=not self.scheduler.running or self.kv_manager.short_of_room)
        began = time.perf_counter()
        step = None if due else self._again(began)
        settled = self._settle(interruptible) if step is None else []
        if due:
            self._idle_time.use_share()
            began = time.perf_counter()
        self.kv_manager.short_of_room = False
        lone = step is None and self.scheduler.lone  # a step without scheduling computes no prompt
        step = step or self.scheduler.step(began, self._most_prefill(lone))
        self.kv_manager.prefetcher.look_ahead(self.scheduler.waiting)
        self.residency.demote()
        ended = self._leave(step)
        if on_leave is not None:
            for request in ended:
                on_leave(request)
        try:
            made = self._pass(step)
        except BaseException as error:  # tokens may count as computed that are not
            return ended + settled + self._fail([*step.decode, *dict(step.prefill)], error, interruptible)
        self._idle = not made.owners and not ended and not settled
        if not made.owners:
            return ended + settled
        self._steps += 1
        behind = self._in_flight is not None
        try:
            advanced = self._compute(made, interruptible)
        except BaseException as error:  # a failed pass ends only its own requests
            return ended + settled + self._fail(made.owners, error, interruptible)
        seconds = time.perf_counter() - began - made.waited_s
        self._budget.took(sum(tokens for _, tokens in step.prefill) - self._unrun(made), seconds, lone=lone)
        self._idle_time.busy_for(seconds)
        # A step that fills or empties the device's queue is shorter or longer than others.
        steady = not settled and behind == (self._in_flight is not None)
        if self.speculator is not None and made.only_answers and steady:
            self.speculator.took(len(made.decode), sum(len(draft.tokens) for draft in made.drafts.values()), seconds)
        for observer in self.observers:
            observer.stepped(seconds)
        return ended + settled + advanced

    def _fail(self, owners: Sequence[Task], error: BaseException, interruptible: bool) -> list[Task]:
        """End the tasks of a failed pass; see ``step``. Raises the error again if it interrupts the caller."""
        failed = list(dict.fromkeys(owners))
        stops = interruptible and not isinstance(error, Exception)
        for request in failed:  # all of them first: the store keeps nothing of a failed request
            interrupted = AbortedError(f"request {request.id}: its pass was interrupted")
            request.error = interrupted if stops else fault_of(error)
        for request in failed:
            self.release(request)
        if stops:
            raise error
        return failed

    def poll(self) -> None:
        """Take over loaded segments, and release the slots of finished copies."""
        for spec, left_s in self.residency.poll():
            self.kv_manager.retention.loaded(spec, left_s)

    def idle_step(self, *, whole: bool = False, only: Collection[IdleWorker | None] | None = None) -> bool:
        """Use idle time. Returns False if there was no work for it.

        Args:
            whole, only: see IdleTime.use. A request that arrives meanwhile waits for the end of the pass.
        """
        if self.busy:
            return False
        self.residency.demote()
        return self._idle_time.use(whole=whole, only=only)

    def evict(self, specs: Sequence[SegmentSpec], labels: frozenset[bytes] = frozenset()) -> int:
        """Remove segments from the pool and all tiers; see Retention.evict. Returns the number of stored tokens
        removed.
        """
        return self.kv_manager.retention.evict(specs, self.scheduler.oldest(), labels)

    def evict_texts(self, salt: str) -> int:
        """Remove the text outside modules of all requests with a cache salt. Returns the number of tokens removed."""
        return self.kv_manager.retention.evict_texts(salt, self.scheduler.oldest())

    def forget(self) -> int:
        """Remove all stored segments that no request reads, and forget repeated prefixes. Returns their tokens."""
        before = self.store.tokens
        if self.promoter is not None:
            self.promoter.clear()
        self.kv_manager.orders.counts.clear()
        for sampler in (self.shadow, self.meter):
            if sampler is not None:
                sampler.clear()
        if self.speculator is not None:
            self.speculator.earlier.clear()
        self.residency.clear_host()
        self.store.clear()
        return before - self.store.tokens

    def release(self, task: Task) -> None:
        """Remove a finished or cancelled task. Its computed KV stays until the room is needed."""
        self.scheduler.remove(task)
        self._scoring.discard(task)
        self._plans.forget(task)
        if self._in_flight is not None:
            self._in_flight.forget(task)
        if isinstance(task, Request) and task.usage is not None:
            self._learn(task)
        self._end_drafts(task)

    def _end_drafts(self, task: Task) -> None:
        """Forget the drafts of a task that has left. A complete answer is kept for later drafts."""
        if isinstance(task, Request) and self.speculator is not None:
            complete = task.answer.finish_reason is not None and task.error is None
            self.speculator.ended(task, keep=complete and not self.kv_manager.retention.reads_evicted(task))

    def _learn(self, request: Request) -> None:
        """Record the prompt for idle workers, unless it reads evicted segments."""
        if self.kv_manager.retention.reads_evicted(request):
            return
        if self.profiler is not None:
            self.profiler.miss(*request.prompt.unprofiled())
            self.profiler.encode(*request.prompt.to_encode(), salt=request.prompt.request.salt)
        prefix = request.prompt.prefix
        if self.promoter is not None and prefix is not None and request.leader is None:
            self.promoter.asked(request.prompt.request.salt, prefix)
        for sampler in (self.shadow, self.meter):
            if sampler is not None:
                sampler.answered(request)

    def _most_prefill(self, lone: bool) -> int | None:
        """The most prompt tokens of the next pass; None for no limit."""
        most = self._budget.tokens(self._max_tokens, lone=lone)
        if not self._scoring:
            return most
        rows = most_rows(self.runner.vocabulary)
        return rows if most is None else min(most, rows)

    def _leave(self, step: Step[Task]) -> list[Task]:
        if step.preempted or step.expired:
            self._plans.forget()
        self._preemptions += len(step.preempted)
        self._scoring.difference_update(step.expired, (task for task, _ in step.failed))
        for task in step.preempted:
            task.preemptions += 1
        for task in step.expired:
            task.error = DeadlineError(f"request {task.id}: its deadline has passed")
        for task, reason in step.failed:
            task.refuse(reason)
        for task in (*step.expired, *(task for task, _ in step.failed)):
            self._end_drafts(task)
        for task in step.done:
            assert isinstance(task, Encoding), "a request always has a token to compute"
            task.complete = True
        return [*step.expired, *step.done, *(task for task, _ in step.failed)]

    def _pass(self, step: Step[Task]) -> ForwardPass:
        made = ForwardPass(decode=[task for task in step.decode if isinstance(task, Request)])
        made.drafts = self._drafts(made.decode, sum(tokens for _, tokens in step.prefill))
        for request in made.decode:
            draft = made.drafts[request].tokens if request in made.drafts else ()
            made.add(request, [request.decode_work(draft, ahead=self._in_flight is not None)])
        for task, tokens in step.prefill:
            work, completed = task.allocation.take(tokens)
            made.add(task, work)
            made.completed += [(task, prefill) for prefill in completed]
        return made

    def _drafts(self, decode: Sequence[Request], prefill: int) -> dict[Request, Draft]:
        """The drafts of the next pass, as far as there is room for their rows. ``prefill``: its prompt tokens."""
        if self.speculator is None or self._in_flight is not None or not decode:
            return {}
        rows = len(decode) + prefill
        drafts: dict[Request, Draft] = {}
        for request, draft in self.speculator.drafts(decode, rows, self._max_tokens - rows).items():
            cut = draft.cut(self.kv_manager.grow_ahead(request, len(draft.tokens)))
            if cut is not None:
                drafts[request] = cut
                self.scheduler.charge(request, len(cut.tokens))
        return drafts

    def _compute(self, made: ForwardPass, interruptible: bool) -> list[Task]:
        began = time.perf_counter()
        hidden: list[Tensor] = []
        logits = self._forward(made, hidden if made.embedded else None) if made.work else torch.empty(0, 0)
        failed = self._check(made, interruptible) if made.checks else []
        settled = self._settle(interruptible)
        logits = made.drop([*failed, *(request for request in made.decode if request.finished)], logits)
        lost = made.settle_arrivals(len(self.runner.storage.keys)) if made.arrivals else []
        logits = made.drop(lost, logits)
        for request in lost:  # no token of it was emitted, and nothing is kept
            request.read_again()
            self.scheduler.requeue(request)
        for observer in self.observers:
            sampled_from = logits[len(logits) - len(made.sampled) :]
            observer.computed(made, sampled_from, self.scheduler.running, time.perf_counter() - began)
        for task, prefill in made.completed:
            self.kv_manager.computed(task, prefill)
        for request in made.decode:
            request.decoded()
        for request in made.selected:
            try:
                self._select(request)
            except BaseException as error:  # other requests of the pass are not affected
                failed += self._fail([request], error, interruptible)
        for encoding in made.encodings:
            self._next_batch(encoding)
        sampled = len(logits) - len(made.sampled)
        damaged = [*self._score(made, logits[:sampled]), *self._embed(made, hidden)]
        advanced = [*damaged, *self._sample(made, logits[sampled:]), *self._end(made)]
        return [*dict.fromkeys([*settled, *failed, *advanced]), *made.encodings]

    def _check(self, made: ForwardPass, interruptible: bool) -> list[Task]:
        """Run the work for the first layers only. Returns the tasks that failed in it."""
        try:
            self.runner.run_to_check(made.checks)
        except BaseException as error:
            return self._fail(made.checked, error, interruptible)
        return []

    def _forward(self, made: ForwardPass, hidden: list[Tensor] | None) -> Tensor:
        """Run the pass and return its logits. ``hidden`` receives the hidden states, see Runner.run."""
        plan = self._plans.plan_of(made)
        await_layer = made.await_layer if made.arrivals else None
        ids = None if made.arrivals or self._in_flight is None else self._in_flight.ids(made.decode)
        return self.runner.run(made.work, made.wanted, plan, await_layer=await_layer, ids=ids, hidden=hidden)

    def _next_batch(self, encoding: Encoding) -> None:
        """Queue an encoding for its next batch once this one is computed, behind the waiting jobs."""
        if encoding.prompt_left:
            return
        if encoding.left:
            encoding.arrival = time.perf_counter()
            self.scheduler.requeue(encoding)
        else:
            encoding.complete = True
            self.release(encoding)

    def _select(self, request: Request) -> None:
        """Choose the recomputed tokens of a prompt after its selecting pass, and queue the request again."""
        selection = request.selection
        assert selection is not None, "the pass for that is over"
        scores = selection.scores(self.store, self.runner)
        request.prompt.select(scores, self.kv_manager.profiles)
        request.prefill.selecting_tokens += selection.cost(request.prompt.composed, self.runner)
        self.scheduler.requeue(request)

    def _unrun(self, made: ForwardPass) -> int:
        """The tokens to subtract from the pass, because some ran through only a part of the layers."""
        rows = sum(work.part.rows for work in made.checks)
        return rows - self.runner.check_cost(rows)

    def _score(self, made: ForwardPass, logits: Tensor) -> list[Request]:
        """Add the log-probabilities of prompts. Returns the requests that ended with an error."""
        for request, first, rows in made.scored:
            request.score(first, logits[: len(rows)])
            logits = logits[len(rows) :]
            if request.error is not None:
                self.release(request)
            elif request.scores is not None and request.scores.complete:
                self._scoring.discard(request)
        return [request for request, _, _ in made.scored if request.error is not None]

    def _embed(self, made: ForwardPass, hidden: Sequence[Tensor]) -> list[Request]:
        """Add the hidden states of embedded prompts. Returns the requests that ended with an error."""
        at = sum(len(rows) for _, _, rows in made.scored)
        for request, rows in made.embedded:
            request.embed(hidden[0][at : at + len(rows)])
            at += len(rows)
            if request.error is not None:
                self.release(request)
            elif request.embedding is not None and request.embedding.complete:
                self._scoring.discard(request)
        return [request for request, _ in made.embedded if request.error is not None]

    def _end(self, made: ForwardPass) -> list[Request]:
        """End the requests without new tokens, once their prompts are computed."""
        for request in made.ended:
            if request.error is None:
                request.answer.finish("length", time.perf_counter())
            self.release(request)
        return made.ended

    def _sample(self, made: ForwardPass, logits: Tensor) -> list[Request]:
        if not made.sampled:
            return []
        requests = [request for request, _ in made.sampled]
        rows = []
        for request in dict.fromkeys(requests):
            rows += [request.sampling.row, *(made.drafts[request].rows if request in made.drafts else ())]
        in_flight = InFlight(requests, begin(logits, rows), logits, made.drafts)
        if in_flight.may_wait and made.only_answers and not self._expects_draft(made.decode):
            self._in_flight = in_flight
            return []
        return self._accept(in_flight)

    def _expects_draft(self, decode: Sequence[Request]) -> bool:
        """True if the next step needs the tokens of this one, because a draft is likely to pay."""
        return self.speculator is not None and bool(self.speculator.drafts(decode, len(decode), len(decode)))

    def _accept(self, in_flight: InFlight) -> list[Request]:
        """Add the new tokens to their requests, and release those that ended."""
        accepted = in_flight.accept()
        if self.speculator is not None:
            for request, draft in in_flight.drafts.items():
                self.speculator.verified(request, draft, in_flight.accepted.get(request, 0))
        for request in accepted:
            if request.finished:
                self.release(request)
        return accepted

    # The device starts its next step before the host knows the last tokens, if that step only adds one more token to
    # the same answers. The host reads the tokens during that step and before the next choice, because grammars,
    # penalties and bad words depend on them. A request that has ended wastes one row of this pass.

    def _again(self, now: float) -> Step[Task] | None:
        """The next step, if it can start before the tokens of the last one are known."""
        in_flight = self._in_flight
        if in_flight is None or not all(task in in_flight.requests for task in self.scheduler.running):
            return None
        return self.scheduler.again(now, in_flight.leaving)

    def _settle(self, interruptible: bool) -> list[Task]:
        """Accept the tokens of the last step that only the device knows. Returns the tasks that advanced."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return []
        try:
            return [*self._accept(in_flight)]
        except BaseException as error:
            return self._fail([*in_flight.requests], error, interruptible)
