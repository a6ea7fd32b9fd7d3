"""The engine: requests in, tokens out, one forward pass a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from inlay.attention.plan import Plan, advance, build_plan
from inlay.cache.segment import SegmentSpec
from inlay.cache.store import SegmentStore
from inlay.engine.encoder import Encoder, Progress
from inlay.engine.pass_budget import PassBudget
from inlay.engine.placing import Placing
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.engine.sampler import sample
from inlay.engine.scheduler import Scheduler, Step
from inlay.engine.seat import Prefill, Work
from inlay.errors import AbortedError, DeadlineError, QueueFullError
from inlay.types import EngineStats


@dataclass
class _Pass:
    """One forward pass: work in row order, whose it is, what it completes, and which row each new token comes from.

    decode: requests that compute the token they said last; their work comes first.
    """

    work: list[Work] = field(default_factory=list)
    owners: list[Request] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    completed: list[tuple[Request, Prefill]] = field(default_factory=list)
    sampled: list[tuple[Request, int]] = field(default_factory=list)
    rows: int = 0

    def add(self, request: Request, work: Sequence[Work]) -> None:
        for each in work:
            self.work.append(each)
            self.owners.append(request)
            self.rows += each.span.length
        if not request.prompt_left:
            self.sampled.append((request, self.rows - 1))


class Engine:
    """Runs requests over one store of segments.

    max_requests, max_tokens, prefill_chunk, max_waiting: see Scheduler. max_pass_s: see PassBudget.
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
    ) -> None:
        self.store = store
        self._runner = runner
        self._max_tokens = max_tokens
        self._budget = PassBudget(max_pass_s)
        self._encoder = Encoder(store, runner, max_tokens, self._budget)
        self._placing = Placing(store)
        self.scheduler: Scheduler[Request] = Scheduler(
            max_requests, max_tokens, prefill_chunk, max_waiting, self._placing
        )
        self._decoding: tuple[list[Request], Plan] | None = None  # the last step's plan, where it was decoding alone
        self._steps = self._preemptions = 0

    def encode(self, specs: Iterable[SegmentSpec], progress: Progress | None = None) -> None:
        """Make sure that these segments are stored. Raises CapacityError."""
        self._encoder.encode(specs, progress)

    def encoding(self, specs: Iterable[SegmentSpec], max_tokens: int) -> Generator[tuple[int, int]]:
        """The same in passes of at most ``max_tokens`` tokens, between which others may run; see Encoder.passes."""
        return self._encoder.passes(specs, max_tokens)

    def stored(self, specs: Iterable[SegmentSpec]) -> frozenset[bytes]:
        """The keys of those segments that are stored."""
        return frozenset(spec.key for spec in specs if self.store.get(spec) is not None)

    def stats(self) -> EngineStats:
        """What is going on; may be called from any thread."""
        running, pool = list(self.scheduler.running), self.store.pool
        held: set[int] = set()
        for request in running:
            seat = request.seat
            read = [segment.slots for segment in list(seat.hold.segments)]
            held.update(chunk for slots in (seat.modules, seat.tail, *read) for chunk in pool.chunks_of(slots))
        return EngineStats(
            running=len(running),
            waiting=len(self.scheduler.waiting),
            chunks=pool.chunks,
            used_chunks=pool.chunks - pool.free_chunks,
            held_chunks=len(held),
            segments=len(self.store),
            stored_tokens=self.store.tokens,
            steps=self._steps,
            preemptions=self._preemptions,
        )

    def add(self, request: Request) -> None:
        """Queue a request and the answers that follow it. Raises QueueFullError; then none of them is queued."""
        try:
            for member in request.family:
                self.scheduler.add(member)
        except QueueFullError:
            for member in request.family:
                self.scheduler.remove(member)
            raise

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self, *, on_leave: Callable[[Request], None] | None = None, interruptible: bool = True) -> list[Request]:
        """Schedule, run one forward pass, sample. Returns the requests that have a new token, or have ended.

        on_leave: called with those who end before the pass, so that they need not wait for it.
        interruptible: whether what stops a program (KeyboardInterrupt, SystemExit) is raised again, when those in the
            pass have been ended; False on a thread where nobody sends that, so that it is a fault like others.
        """
        began = time.perf_counter()
        step = self.scheduler.step(began, self._budget.tokens(self._max_tokens))
        ended = self._leave(step)
        if on_leave is not None:
            for request in ended:
                on_leave(request)
        made = self._pass(step)
        if not made.work:
            return ended
        self._steps += 1
        try:
            advanced = self._compute(made)
        except BaseException as error:  # a failed pass ends those who were in it, and nobody else
            failed = list(dict.fromkeys(made.owners))
            stops = interruptible and not isinstance(error, Exception)
            for request in failed:
                interrupted = AbortedError(f"request {request.id}: its pass was interrupted")
                request.error = interrupted if stops else fault_of(error)
                self.release(request)
            if stops:
                raise
            return ended + failed
        self._budget.took(sum(tokens for _, tokens in step.prefill), time.perf_counter() - began)
        return ended + advanced

    def release(self, request: Request) -> None:
        """Take a request out, whether it has ended or is given up; what it has computed stays while there is room."""
        self.scheduler.remove(request)
        self._decoding = None

    def _leave(self, step: Step[Request]) -> list[Request]:
        if step.preempted or step.expired:
            self._decoding = None
        self._preemptions += len(step.preempted)
        for request in step.preempted:
            request.preemptions += 1
        for request in step.expired:
            request.error = DeadlineError(f"request {request.id}: its deadline has passed")
        for request, reason in step.failed:
            request.error = reason
        return [*step.expired, *(request for request, _ in step.failed)]

    def _pass(self, step: Step[Request]) -> _Pass:
        made = _Pass(decode=step.decode)
        for request in step.decode:
            made.add(request, [request.decode_work()])
        for request, tokens in step.prefill:
            work, completed = request.seat.take(tokens)
            made.add(request, work)
            made.completed += [(request, prefill) for prefill in completed]
        return made

    def _compute(self, made: _Pass) -> list[Request]:
        logits = self._runner.run(made.work, [row for _, row in made.sampled], self._plan(made))
        for request, prefill in made.completed:
            self._placing.computed(request, prefill)
        for request in made.decode:
            request.decoded()
        advanced = [request for request, _ in made.sampled]
        tokens = sample(logits, [request.row for request in advanced])
        for request, token, row in zip(advanced, tokens, logits, strict=True):
            request.accept(request.choose(row, token))
            if request.finished:
                self.release(request)
        return advanced

    def _plan(self, made: _Pass) -> Plan:
        """The pass's plan; while the same requests go on answering, the last one with its lengths advanced."""
        spans = [work.span for work in made.work]
        if len(made.decode) < len(made.work):
            self._decoding = None
            return build_plan(spans)
        before = self._decoding
        if before is not None and before[0] == made.owners and _follows(before[1], made.work):
            plan = advance(before[1], spans)
        else:
            plan = build_plan(spans)
        self._decoding = (made.owners, plan)
        return plan


def fault_of(error: BaseException) -> Exception:
    """A fault as those who wait for an answer can be told of it.

    What is no Exception, such as a panic in a library written in Rust, would end whoever it is raised to.
    """
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _follows(plan: Plan, work: Sequence[Work]) -> bool:
    """Whether every request's next slot lies right behind its last one."""
    return all(before.slots[0].end == after.span.slots[0].first for before, after in zip(plan.spans, work, strict=True))
