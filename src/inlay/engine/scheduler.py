"""Which requests run in the next step: iteration-level batching, decided anew before every forward pass.

Pure logic: jobs say what they still need, a memory says whether there is room, and time is an argument. In this order:

1. jobs past their deadline end
2. every answer that is under way gets its next token; where the pool has no chunk left for one, the job that comes
   last in line is preempted: it loses its place in the pool and waits to be computed again
3. prompts that are under way get what the token budget leaves, so that a long prompt does not hold up answers
4. waiting jobs are admitted while there is budget, a place in the batch and room in the pool

Jobs stand in line by priority (a lower number first), then by arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from inlay.errors import CapacityError, QueueFullError


class Admission(Enum):
    """What a memory says to a job that wants to run."""

    ADMITTED = "admitted"
    NO_ROOM = "no room"
    LATER = "later"  # somebody is computing what it could share


class Job(Protocol):
    """A request as the scheduler sees it. deadline: when it ends whether or not it has its answer; None for never."""

    priority: int
    arrival: float
    deadline: float | None

    @property
    def prompt_left(self) -> int:
        """How many tokens it has to compute before its next token can be sampled; 0 while it answers."""
        ...


_ALONE = "the KV pool has no room for this request beside what is held in it; give a larger kv_memory"

J = TypeVar("J", bound=Job)
K = TypeVar("K", bound=Job, contravariant=True)


class Memory(Protocol[K]):
    """The pool as the scheduler sees it."""

    def admit(self, job: K) -> Admission:
        """Find what is stored of a job and reserve room for the rest. Raises CapacityError where it can never run."""
        ...

    def grow(self, job: K) -> bool:
        """Make room for the job's next token."""
        ...

    def release(self, job: K) -> None:
        """Take back what a job has."""
        ...


@dataclass
class Step(Generic[J]):
    """What the next forward pass computes, and who left.

    decode: jobs that compute one token. prefill: jobs with how many tokens of their prompts are computed.
    preempted: jobs that wait again. expired: jobs past their deadline. failed: jobs that cannot run, and why.
    """

    decode: list[J] = field(default_factory=list)
    prefill: list[tuple[J, int]] = field(default_factory=list)
    preempted: list[J] = field(default_factory=list)
    expired: list[J] = field(default_factory=list)
    failed: list[tuple[J, Exception]] = field(default_factory=list)


class Scheduler(Generic[J]):
    """Waiting and running jobs.

    max_requests: the most that run at the same time.
    max_tokens: the most tokens of one step.
    prefill_chunk: the most prompt tokens of a step in which others answer.
    max_waiting: the most that wait; None for no bound.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, prefill_chunk: int, max_waiting: int | None, memory: Memory[J]
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._prefill_chunk = prefill_chunk
        self._max_waiting = max_waiting
        self._memory = memory
        self._line: dict[J, tuple[int, float, int]] = {}  # every job with its place in line
        self._count = 0
        self._no_room: J | None = None  # who was told so since somebody left: until then it need not ask again
        self.waiting: list[J] = []
        self.running: list[J] = []

    def add(self, job: J) -> None:
        """Let a job stand in line. Raises QueueFullError."""
        if self._max_waiting is not None and len(self.waiting) >= self._max_waiting:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already, as many as max_waiting allows")
        self._count += 1
        self._line[job] = (job.priority, job.arrival, self._count)
        self._queue(job)

    def remove(self, job: J) -> None:
        """Forget a job, wherever it stands, and take back what it has; nothing for one that is not known."""
        if self._line.pop(job, None) is None:
            return
        if job in self.running:
            self._leave(job)
        else:
            self.waiting.remove(job)
            self._no_room = None

    def step(self, now: float, max_prefill: int | None = None) -> Step[J]:
        """Decide on the next forward pass.

        now: on the clock of arrivals and deadlines. max_prefill: the most prompt tokens of this step; None for no
        further bound.
        """
        step: Step[J] = Step()
        self._expire(step, now)
        self._decode(step)
        budget = self._max_tokens - len(step.decode)
        if step.decode:
            budget = min(budget, self._prefill_chunk)
        if max_prefill is not None:
            budget = min(budget, max_prefill)
        budget = self._prefill(step, budget)
        if not step.preempted:
            self._admit(step, budget)
        return step

    def _expire(self, step: Step[J], now: float) -> None:
        for job in [*self.running, *self.waiting]:
            if job.deadline is not None and job.deadline <= now:
                self.remove(job)
                step.expired.append(job)

    def _decode(self, step: Step[J]) -> None:
        for job in list(self.running):
            if job.prompt_left or job not in self.running:
                continue
            while not self._memory.grow(job):
                last = self.running[-1]
                self._preempt(last, step)
                if last is job:
                    break
            else:
                step.decode.append(job)
        step.decode = [job for job in step.decode if job in self.running]

    def _leave(self, job: J) -> None:
        self.running.remove(job)
        self._memory.release(job)
        self._no_room = None

    def _preempt(self, job: J, step: Step[J]) -> None:
        self._leave(job)
        self._queue(job)
        step.preempted.append(job)

    def _prefill(self, step: Step[J], budget: int) -> int:
        for job in self.running:
            tokens = min(budget, job.prompt_left)
            if tokens > 0:
                step.prefill.append((job, tokens))
                budget -= tokens
        return budget

    def _admit(self, step: Step[J], budget: int) -> None:
        places = self._max_requests - len(self.running)
        for job in list(self.waiting):
            if budget <= 0 or places <= 0 or job is self._no_room:
                return
            try:
                answer = self._memory.admit(job)
            except Exception as error:  # it can never run, or there is a fault in what it asks for: its end, alone
                self.remove(job)
                step.failed.append((job, error))
                continue
            if answer is Admission.NO_ROOM and not self.running:
                self.remove(job)
                step.failed.append((job, CapacityError(_ALONE)))
                continue
            if answer is Admission.NO_ROOM:
                self._no_room = job
                return  # nobody overtakes it: a large request would wait for ever
            places -= 1  # one that waits for somebody keeps its place: a long line is not asked through at every step
            assert answer is Admission.ADMITTED or self.running, "a job waits for what nobody computes"
            if answer is Admission.ADMITTED:
                self.waiting.remove(job)
                self._insert(self.running, job)
                tokens = min(budget, job.prompt_left)
                step.prefill.append((job, tokens))
                budget -= tokens

    def _queue(self, job: J) -> None:
        self._insert(self.waiting, job)

    def _insert(self, jobs: list[J], job: J) -> None:
        place = self._line[job]
        at = next((i for i, other in enumerate(jobs) if self._line[other] > place), len(jobs))
        jobs.insert(at, job)
