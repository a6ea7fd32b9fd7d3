"""The engine: requests in, tokens out, one forward pass a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from inlay.engine.background.idle import IdleTime, IdleWorker
from inlay.engine.background.profiler import Profiler
from inlay.engine.background.promoter import Promoter
from inlay.engine.background.shadow import ShadowSampler
from inlay.engine.encoder import Encoding, Task
from inlay.engine.faults import fault_of
from inlay.engine.forward import ForwardPass, PassPlans, StepObserver
from inlay.engine.in_flight import InFlight
from inlay.engine.jobs import Step
from inlay.engine.kv_manager import KVCacheManager
from inlay.engine.pass_budget import PassBudget
from inlay.engine.prompt_scores import most_rows
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.engine.scheduler import Scheduler
from inlay.errors import AbortedError, DeadlineError, QueueFullError
from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.residency import Residency
from inlay.kv.offload.tier import Kept
from inlay.kv.store import SegmentStore
from inlay.sampling.sampler import begin
from inlay.types import EngineStats


class Engine:
    """Runs requests over one store of segments.

    max_requests, max_tokens, prefill_chunk, max_waiting: see Scheduler. max_pass_s: see PassBudget.
    profiler: makes profiles of modules while there is nothing else to do; None for none. promoter: encodes then what is
        asked for again; None for nothing. shadow: compares answers with full prefill then; None for none.
    residency, kept, pin_share, prefetch_likely: see KVCacheManager; without tiers below the pool, if not given.

    Who is in ``observers`` is told of every step that computes something.
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
        residency: Residency | None = None,
        kept: Kept = Kept.SCHEMAS,
        pin_share: float = 0.25,
        prefetch_likely: bool = False,
    ) -> None:
        self.store = store
        self.runner = runner
        self._max_tokens = max_tokens
        self._budget = PassBudget(max_pass_s)
        self.residency = residency or Residency(store, runner.storage)
        self.kv_manager = KVCacheManager(
            store, self.residency, kept=kept, pin_share=pin_share, prefetch_likely=prefetch_likely
        )
        self.profiler = profiler
        if profiler is not None:
            self.kv_manager.profiles = profiler.profiles
        self.promoter = promoter
        self.kv_manager.when_over(self._forget_modules)
        self.shadow = shadow
        self._idle_time = IdleTime((profiler, promoter, shadow), self._budget, max_tokens)
        self.scheduler: Scheduler[Task] = Scheduler(
            max_requests, max_tokens, prefill_chunk, max_waiting, self.kv_manager, self.kv_manager.waits
        )
        self.kv_manager.alone = lambda: not self.scheduler.running
        self.observers: list[StepObserver] = []
        self._plans = PassPlans()
        self._scoring: set[Task] = set()  # who waits or runs, and its prompt is still to be scored
        self._in_flight: InFlight | None = None  # the last step's tokens, where only a device has them
        self._steps = self._preemptions = 0
        self._idle = False  # whether the last step had nothing to do

    def stats(self) -> EngineStats:
        """What is going on; may be called from any thread."""
        running, pool = list(self.scheduler.running), self.store.pool
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
        )

    def add(self, task: Task) -> None:
        """Queue a request and the answers that follow it, or an encoding.

        Raises QueueFullError, and CapacityError for an encoding larger than the pool; then none of it is queued.
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
        if isinstance(task, Request) and task.scores is not None and not task.scores.complete:
            self._scoring.add(task)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def stalled(self) -> bool:
        """Whether the last step found that all who are under way wait for what is read from a lower tier."""
        return self._idle and self.busy and (self.residency.moving or self.residency.holding)

    def step(self, *, on_leave: Callable[[Task], None] | None = None, interruptible: bool = True) -> list[Task]:
        """Schedule, run one forward pass, sample.

        Returns the requests that have a new token, the encodings that have come further, and those that have ended.

        on_leave: called with those who end before the pass, so that they need not wait for it.
        interruptible: whether what stops a program (KeyboardInterrupt, SystemExit) is raised again, when those in the
            pass have been ended; False on a thread where nobody sends that, so that it is a fault like others.
        """
        self.residency.poll()
        due = self._idle_time.due and bool(self.scheduler.running)
        self._idle_time.give_up(wanted=not self.scheduler.running or self.kv_manager.short_of_room)
        began = time.perf_counter()
        step = None if due else self._again(began)
        settled = self._settle(interruptible) if step is None else []
        if due:
            self._idle_time.use_share()
            began = time.perf_counter()
        self.kv_manager.short_of_room = False
        step = step or self.scheduler.step(began, self._most_prefill())
        self.kv_manager.prefetcher.look_ahead(self.scheduler.waiting)
        self.residency.demote()
        ended = self._leave(step)
        if on_leave is not None:
            for request in ended:
                on_leave(request)
        made = self._pass(step)
        self._idle = not made.owners and not ended and not settled
        if not made.owners:
            return ended + settled
        self._steps += 1
        try:
            advanced = self._compute(made, interruptible)
        except BaseException as error:  # a failed pass ends those who were in it, and nobody else
            return ended + settled + self._fail(made.owners, error, interruptible)
        seconds = time.perf_counter() - began - made.waited_s
        self._budget.took(sum(tokens for _, tokens in step.prefill) - self._unrun(made), seconds)
        self._idle_time.busy_for(seconds)
        for observer in self.observers:
            observer.stepped(seconds)
        return ended + settled + advanced

    def _fail(self, owners: Sequence[Task], error: BaseException, interruptible: bool) -> list[Task]:
        """End those whose pass has failed; see ``step``. Raises the error again where it stops the program."""
        failed = list(dict.fromkeys(owners))
        stops = interruptible and not isinstance(error, Exception)
        for request in failed:
            interrupted = AbortedError(f"request {request.id}: its pass was interrupted")
            request.error = interrupted if stops else fault_of(error)
            self.release(request)
        if stops:
            raise error
        return failed

    def idle_step(self, *, whole: bool = False, only: Collection[IdleWorker | None] | None = None) -> bool:
        """Use a moment in which there is nothing to decide; returns whether there was any use for it.

        whole, only: see IdleTime.use; who comes meanwhile waits for the end of the pass.
        """
        if self.busy:
            return False
        self.residency.demote()
        return self._idle_time.use(whole=whole, only=only)

    def evict(self, specs: Sequence[SegmentSpec]) -> int:
        """Forget segments wherever they are; see Retention.evict. Returns how many tokens of them were stored."""
        return self.kv_manager.retention.evict(specs, self.scheduler.oldest())

    def evict_texts(self, salt: str) -> int:
        """Forget the text of all requests with a salt that is no module. Returns how many tokens that were."""
        if self.promoter is not None:
            self.promoter.forget_salt(salt)
        return self.kv_manager.retention.evict_texts(salt, self.scheduler.oldest())

    def _forget_modules(self, keys: frozenset[bytes]) -> None:
        """Forget what was made of modules whose time is over, or that are evicted."""
        if self.promoter is not None:
            self.promoter.forget_modules(keys)
        if self.profiler is not None:
            self.profiler.forget(keys)
        self.kv_manager.profiles.forget(keys)

    def forget(self) -> None:
        """Forget all that is stored and that no request reads, and what is asked for again."""
        if self.promoter is not None:
            self.promoter.clear()
        self.kv_manager.orders.counts.clear()
        if self.shadow is not None:
            self.shadow.clear()
        self.residency.clear_host()
        self.store.clear()

    def release(self, task: Task) -> None:
        """Take it out, whether it has ended or is given up; what it has computed stays while there is room."""
        self.scheduler.remove(task)
        self._scoring.discard(task)
        self._plans.forget(task)
        if self._in_flight is not None:
            self._in_flight.forget(task)
        if isinstance(task, Request) and task.usage is not None:
            self._learn(task)

    def _learn(self, request: Request) -> None:
        """Note what of a request's prompt is worth idle time; nothing of what was evicted meanwhile."""
        if self.kv_manager.retention.reads_evicted(request):
            return
        if self.profiler is not None:
            self.profiler.miss(*request.prompt.unprofiled())
        prefix = request.prompt.prefix
        if self.promoter is not None and prefix is not None and request.leader is None:
            self.promoter.asked(request.prompt.request.salt, prefix)
        if self.shadow is not None:
            self.shadow.answered(request)

    def _most_prefill(self) -> int | None:
        """How many prompt tokens the next pass may have."""
        most = self._budget.tokens(self._max_tokens)
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
        for task in step.done:
            assert isinstance(task, Encoding), "a request always has a token to compute"
            task.complete = True
        return [*step.expired, *step.done, *(task for task, _ in step.failed)]

    def _pass(self, step: Step[Task]) -> ForwardPass:
        made = ForwardPass(decode=[task for task in step.decode if isinstance(task, Request)])
        for request in made.decode:
            made.add(request, [request.decode_work(ahead=self._in_flight is not None)])
        for task, tokens in step.prefill:
            work, completed = task.allocation.take(tokens)
            made.add(task, work)
            made.completed += [(task, prefill) for prefill in completed]
        return made

    def _compute(self, made: ForwardPass, interruptible: bool) -> list[Task]:
        began = time.perf_counter()
        logits = self._forward(made) if made.work else torch.empty(0, 0)
        failed = self._check(made, interruptible) if made.checks else []
        settled = self._settle(interruptible)
        logits = made.drop([*failed, *(request for request in made.decode if request.finished)], logits)
        lost = made.settle_arrivals(len(self.runner.storage.keys)) if made.arrivals else []
        logits = made.drop(lost, logits)
        for request in lost:  # nobody has seen anything of it, and nothing is kept
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
            except BaseException as error:  # nobody else in the pass has anything of it
                failed += self._fail([request], error, interruptible)
        for encoding in made.encodings:
            self._next_batch(encoding)
        sampled = len(logits) - len(made.sampled)
        damaged = self._score(made, logits[:sampled])
        advanced = [*damaged, *self._sample(made, logits[sampled:]), *self._end(made)]
        return [*dict.fromkeys([*settled, *failed, *advanced]), *made.encodings]

    def _check(self, made: ForwardPass, interruptible: bool) -> list[Task]:
        """Run what goes through the first layers alone. Returns whom a fault in that has ended, those whose it was."""
        try:
            self.runner.run_to_check(made.checks)
        except BaseException as error:
            return self._fail(made.checked, error, interruptible)
        return []

    def _forward(self, made: ForwardPass) -> Tensor:
        plan = self._plans.plan_of(made)
        if made.arrivals:
            return self.runner.run(made.work, made.wanted, plan, await_layer=made.await_layer)
        if self._in_flight is None:
            return self.runner.run(made.work, made.wanted, plan)
        return self.runner.run(made.work, made.wanted, plan, ids=self._in_flight.ids(made.decode))

    def _next_batch(self, encoding: Encoding) -> None:
        """Let an encoding whose batch is computed stand in line for the next one, behind those who wait already."""
        if encoding.prompt_left:
            return
        if encoding.left:
            encoding.arrival = time.perf_counter()
            self.scheduler.requeue(encoding)
        else:
            encoding.complete = True
            self.release(encoding)

    def _select(self, request: Request) -> None:
        """Choose what is computed anew of a prompt's modules, now that it is found out, and let it stand in line."""
        selection = request.selection
        assert selection is not None, "the pass for that is over"
        scores = selection.scores(self.store, self.runner)
        request.prompt.select(scores, self.kv_manager.profiles)
        request.prefill.selecting_tokens += selection.cost(request.prompt.composed, self.runner)
        self.scheduler.requeue(request)

    def _unrun(self, made: ForwardPass) -> int:
        """How many tokens fewer a pass took than it had, since some went through a part of the layers alone."""
        rows = sum(work.part.rows for work in made.checks)
        return rows - self.runner.check_cost(rows)

    def _score(self, made: ForwardPass, logits: Tensor) -> list[Request]:
        """Tell prompts their log-probabilities; returns the requests that this has ended."""
        for request, first, rows in made.scored:
            request.score(first, logits[: len(rows)])
            logits = logits[len(rows) :]
            if request.error is not None:
                self.release(request)
            elif request.scores is not None and request.scores.complete:
                self._scoring.discard(request)
        return [request for request, _, _ in made.scored if request.error is not None]

    def _end(self, made: ForwardPass) -> list[Request]:
        """End the requests that want no token, now that their prompts are computed."""
        for request in made.ended:
            if request.error is None:
                request.answer.finish("length", time.perf_counter())
            self.release(request)
        return made.ended

    def _sample(self, made: ForwardPass, logits: Tensor) -> list[Request]:
        if not made.sampled:
            return []
        requests = [request for request, _ in made.sampled]
        in_flight = InFlight(requests, begin(logits, [request.sampling.row for request in requests]), logits)
        if in_flight.may_wait and len(made.decode) == len(made.work):
            self._in_flight = in_flight
            return []
        return self._accept(in_flight)

    def _accept(self, in_flight: InFlight) -> list[Request]:
        """Tell requests their tokens, and let those go that have ended."""
        accepted = in_flight.accept()
        for request in accepted:
            if request.finished:
                self.release(request)
        return accepted

    # A device is given its next step before the host knows the tokens of the last one, where that step is one more
    # token of the same answers. Tokens are taken in while it computes, and before the next ones are chosen: grammars,
    # penalties and words that must not come count them. Who turns out to have ended has a row in that pass for nothing.

    def _again(self, now: float) -> Step[Task] | None:
        """The next step, where it can be taken before the tokens of the last one are known."""
        in_flight = self._in_flight
        if in_flight is None or not all(task in in_flight.requests for task in self.scheduler.running):
            return None
        return self.scheduler.again(now, in_flight.leaving)

    def _settle(self, interruptible: bool) -> list[Task]:
        """Take in the tokens of the last step, where only a device has them. Returns who has one more."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return []
        try:
            return [*self._accept(in_flight)]
        except BaseException as error:
            return self._fail([*in_flight.requests], error, interruptible)
