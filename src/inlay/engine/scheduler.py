"""Decides which requests run in the next step: iteration-level batching, with a new decision before every forward pass.

The scheduler is pure logic. Jobs report their remaining tokens, a memory reports free room, and time is an argument.
A step decides in this order:

1. Jobs past their deadline end.
2. If all slots are taken and a tenant has less than its share, the tenant with the most slots gives one up. Its last
   job is preempted: it loses its allocation and waits to be recomputed.
3. Every decoding job gets its next token. If the pool has no chunk left for one, the last job is preempted.
4. Waiting jobs are admitted while there is token budget, a slot in the batch and room in the pool.
5. Prompts get the rest of the token budget, split by ``Shares``, so that no long prompt delays answers or new jobs.

Jobs are ordered by priority (a lower number first), then by arrival. Among tenants, the one with the fewest running
jobs for its weight is admitted first. A job that finds no room waits for it, and so do the jobs of its tenant behind
it. At most ``max_requests`` jobs of other tenants may overtake it. A job that waits for a lower tier or for another
job's KV takes no slot and blocks no other job. It is admitted again when that wait is over.

The queue is shared too. If it is full, a tenant with less than its share displaces the last job of the tenant with the
most queued jobs. That job ends with QueueFullError.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Generic, Protocol, TypeVar
from weakref import ReferenceType, ref

from inlay.errors import CapacityError, QueueFullError


class Admission(Enum):
    """The answer of a memory to a job that wants to run."""

    ADMITTED = "admitted"
    NO_ROOM = "no room"
    LATER = "later"  # another job is computing KV that this job can share
    COMING = "coming"  # the job's segments are loading from a lower tier
    FREEING = "freeing"  # no room now, but a transfer between the tiers will free some
    TAKEN = "taken"  # no more jobs of this kind may run; others with as many sequences are not asked in this step
    DONE = "done"  # nothing is left to compute


class Job(Protocol):
    """A request or an encoding, as the scheduler sees it.

    Attributes:
        sent: the time of creation, on the clock of ``arrival``.
        deadline: the time when it ends, complete or not. None for no limit.
        tenant: its tenant. All jobs with "" form one tenant.
        weight: the tenant's share relative to other tenants.
        sequences: its share of ``max_requests``; 0 for a job without an answer.
    """

    priority: int
    arrival: float

    @property
    def sent(self) -> float: ...

    deadline: float | None
    tenant: str
    weight: float
    sequences: int

    @property
    def prompt_left(self) -> int:
        """The number of tokens to compute before its next token can be sampled; 0 while it decodes."""
        ...


J = TypeVar("J", bound=Job)
K = TypeVar("K", bound=Job, contravariant=True)
L = TypeVar("L", bound=Job)


class Memory(Protocol[K]):
    """The pool as the scheduler sees it."""

    def admit(self, job: K, alone: bool) -> Admission:
        """Look up a job and allocate room for its missing tokens. Raises CapacityError if it can never run.

        Args:
            alone: True if no other job runs, so that this one may start before all layers are loaded.
        """
        ...

    def grow(self, job: K) -> bool:
        """Make room for the job's next token. Returns False if the pool is full."""
        ...

    def release(self, job: K) -> None:
        """Free a job's allocation."""
        ...


class Waits(Protocol[L]):
    """Reports the jobs with a changed admission, so that waiting jobs need not be asked at every step."""

    def begun(self, job: L, answer: Admission) -> None:
        """Record that a job was answered LATER or COMING."""
        ...

    def over(self, alone: bool) -> Iterable[L]:
        """Return the jobs to ask again, each once. Some may have left meanwhile.

        Args:
            alone: see ``Memory.admit``.
        """
        ...

    @property
    def room(self) -> object:
        """Return a value that changes when a job with the answer FREEING may find room."""
        ...


@dataclass
class Step(Generic[J]):
    """The work of the next forward pass, and the jobs that left.

    Attributes:
        decode: jobs that compute one token.
        prefill: jobs with the number of prompt tokens to compute.
        preempted: jobs that wait again.
        expired: jobs past their deadline.
        done: jobs that had nothing left to compute.
        failed: jobs that can never run or were removed from the queue, with the reason.
    """

    decode: list[J] = field(default_factory=list)
    prefill: list[tuple[J, int]] = field(default_factory=list)
    preempted: list[J] = field(default_factory=list)
    expired: list[J] = field(default_factory=list)
    done: list[J] = field(default_factory=list)
    failed: list[tuple[J, Exception]] = field(default_factory=list)


#: The smallest portion of a pass that a tenant gets at a time, in tokens.
_LEAST = 16


class Shares:
    """How tenants share the tokens of passes, and how the jobs of one tenant share its part.

    Tenants share by weight, as in "Fairness in Serving Large Language Models" (arXiv 2401.00588). Each tenant has a
    counter of its computed tokens divided by its weight. The tenant with the lowest counter is served next. A returning
    tenant starts at the lowest counter of the others, so absence earns no credit.

    Within a tenant, the first job of the queue gets at least a quarter. Other jobs of its priority share three
    quarters, shortest remaining prompt first. So a short prompt has its first token after a pass or two, and every
    prompt advances. Jobs of lower priority share a quarter.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def join(self, tenant: str, active: Set[str]) -> None:
        """Called when a tenant without jobs gets one. ``active`` are the tenants with jobs."""
        lowest = min((self._served.get(other, 0.0) for other in active), default=None)
        if lowest is None:
            self._served.clear()  # no tenant is owed anything
        else:  # absent tenants below the lowest counter would start level anyway, so they are dropped
            self._served = {name: served for name, served in self._served.items() if served > lowest or name in active}
            self._served[tenant] = max(lowest, self._served.get(tenant, 0.0))

    def of(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def charge(self, job: Job, tokens: int) -> None:
        self._served[job.tenant] = self.of(job.tenant) + tokens / job.weight

    def split(self, jobs: Sequence[J], budget: int) -> dict[J, int]:
        """The number of tokens of a pass for each prompt. ``jobs`` are in queue order."""
        if sum(job.prompt_left for job in jobs) <= budget:
            given = {job: job.prompt_left for job in jobs}
            for job, tokens in given.items():
                self.charge(job, tokens)
            return given
        tenants: dict[str, list[J]] = {}
        for job in jobs:
            tenants.setdefault(job.tenant, []).append(job)
        return self._take_turns(tenants, budget)

    def _take_turns(self, tenants: dict[str, list[J]], budget: int) -> dict[J, int]:
        portion = max(_LEAST, budget // len(tenants))
        given: dict[J, int] = {}
        line = [(self.of(tenant), tenant) for tenant in tenants]
        heapify(line)
        while budget and line:
            tenant = heappop(line)[1]
            taken = _within(tenants[tenant], min(portion, budget), given)
            for job, tokens in taken.items():
                given[job] = given.get(job, 0) + tokens
                budget -= tokens
                self.charge(job, tokens)
            if taken:
                heappush(line, (self.of(tenant), tenant))
        return given


def _within(jobs: Sequence[J], tokens: int, given: dict[J, int]) -> dict[J, int]:
    """Split a tenant's part of a pass among its prompts.

    Args:
        jobs: the tenant's jobs, in queue order.
        tokens: the tenant's part.
        given: the tokens that each job has in this pass already.
    """
    left = {job: job.prompt_left - given.get(job, 0) for job in jobs}
    waiting = [job for job in jobs if left[job]]
    newcomers = sorted(waiting[1:], key=lambda job: (job.priority, left[job]))
    peers = [job for job in newcomers if job.priority == waiting[0].priority]
    most, room = tokens * 3 // 4, tokens
    taken: dict[J, int] = {}
    for line, part in ((peers, most), (newcomers[len(peers) :], tokens // 4), (waiting, tokens)):
        part = min(part, room if line is waiting else room - (tokens - most))
        for job in line:
            more = min(part, left[job])
            if more > 0:
                taken[job] = taken.get(job, 0) + more
                left[job] -= more
                part -= more
                room -= more
    return taken


def crowded_out(counts: dict[str, tuple[int, float]], tenant: str, weight: float) -> str | None:
    """Return the tenant that must give up a slot to ``tenant``, if all slots are taken.

    The slot comes from the tenant with the most slots for its weight. It moves only if that tenant still has at least
    as many for its weight afterwards.

    Args:
        counts: (slots, weight) of each tenant with slots.
        tenant: the tenant that asks for a slot.
        weight: its weight.

    Returns:
        None if ``tenant`` has its share already.
    """
    have = counts.get(tenant, (0, weight))[0]
    name = max(counts, key=lambda name: counts[name][0] / counts[name][1], default=None)
    if name is None or name == tenant:
        return None
    count, others = counts[name]
    return name if (have + 1) / weight <= (count - 1) / others else None


#: (tenant, sequences) of a queue, and the admission order of a job, lowest first.
_Key = tuple[str, int]
_Turn = tuple[float, float, tuple[int, float, int]]

_FEW = 64  # the least heap of deadlines to clean up
_STALE = 64  # the least heap of queues to clean up
_STUCK = 4  # the most tenants refused for lack of room in a step
_ALONE = "the KV pool has no room for this request beside what is held in it; give a larger kv_memory"


class Scheduler(Generic[J]):
    """Waiting and running jobs.

    Args:
        max_requests: the most sequences that run at the same time.
        max_tokens: the most tokens of one step.
        prefill_chunk: the most prompt tokens of a step that also decodes.
        max_waiting: the most waiting jobs. None for no limit.
        memory: admits jobs to the pool.
        waits: reports the jobs to ask again. None to ask at every step.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        prefill_chunk: int,
        max_waiting: int | None,
        memory: Memory[J],
        waits: Waits[J] | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._prefill_chunk = prefill_chunk
        self._max_waiting = max_waiting
        self._memory = memory
        self._waits = waits
        self._shares = Shares()
        self._line: dict[J, tuple[int, float, int]] = {}  # every job with its order in the queue
        self._count = 0
        self._jobs: Counter[str] = Counter()  # of every tenant that has jobs
        self._queues: dict[_Key, list[J]] = {}  # jobs to ask, by tenant and sequences, in order
        # Heaps of queues by the turn of their first job, one for each number of sequences. An entry with a turn that
        # has risen is corrected when it comes first. A new entry is added when a turn may have fallen.
        self._heads: dict[int, list[tuple[_Turn, _Key]]] = {}
        self._parked: dict[J, None] = {}  # jobs that wait for a lower tier or another job; not asked
        self._asked: set[J] = set()  # jobs that have been parked before
        self._places: dict[str, tuple[int, float]] = {}  # (slots, weight) of every tenant with running jobs
        self._begun: set[J] = set()  # jobs that have been admitted before
        self._refused: list[tuple[J, Exception]] = []  # jobs removed from the full queue since the last step
        self._no_room: set[J] = set()  # jobs refused since the last job left; not asked again until one leaves
        self._freeing: set[J] = set()  # likewise, for jobs that wait for room between the tiers
        self._room: object = None  # ``waits.room`` at that refusal
        self._overtaken: dict[J, int] = {}  # the number of jobs of other tenants that overtook each refused job
        # a heap of weak references; jobs that left stay in it
        self._deadlines: list[tuple[float, int, ReferenceType[J]]] = []
        self.waiting: list[J] = []
        self.running: list[J] = []

    @property
    def busy(self) -> bool:
        """True if a step has anything to decide."""
        return bool(self.running or self.waiting or self._refused)

    @property
    def lone(self) -> bool:
        """True if at most one request is here. The modules that it waits for do not count."""
        return sum(1 for _ in islice((job for job in self._line if job.sequences), 2)) < 2

    def oldest(self) -> float | None:
        """The time when the oldest job was sent; None without jobs."""
        return min((job.sent for job in self._line), default=None)

    def add(self, job: J) -> None:
        """Queue a job. Raises QueueFullError."""
        if self._max_waiting is not None and len(self.waiting) >= self._max_waiting and not self._put_out_for(job):
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting already, as many as max_waiting allows; send the request "
                "again later, or raise max_waiting"
            )
        if not self._jobs[job.tenant]:
            self._shares.join(job.tenant, {tenant for tenant, count in self._jobs.items() if count})
        self._jobs[job.tenant] += 1
        self._line_up(job)
        if job.deadline is not None:
            self._await_deadline(job, job.deadline)

    def remove(self, job: J) -> None:
        """Remove a job in any state and free its allocation. Does nothing for an unknown job."""
        if job not in self._line:
            self._refused = [(other, reason) for other, reason in self._refused if other is not job]
            return
        try:
            if job in self.running:
                self._leave(job)
            else:
                self._unqueue(job)
                self._may_have_room()
                self._overtaken.pop(job, None)
        finally:  # a fault in the memory must not leave a job half removed
            del self._line[job]
            self._begun.discard(job)
            self._asked.discard(job)
            self._jobs[job.tenant] -= 1
            if not self._jobs[job.tenant]:
                del self._jobs[job.tenant]

    def requeue(self, job: J) -> None:
        """Free a running job's allocation and queue it as a new arrival."""
        try:
            self._leave(job)
        finally:
            self._line_up(job)

    def preempt(self, job: J, step: Step[J]) -> None:
        """Free a running job's allocation and queue it at its old position. Adds it to ``step.preempted``."""
        try:
            self._leave(job)
        finally:
            self._queue(job)
        step.preempted.append(job)

    def step(self, now: float, max_prefill: int | None = None) -> Step[J]:
        """Decide on the next forward pass.

        Args:
            now: the time, on the clock of arrivals and deadlines.
            max_prefill: the most prompt tokens of this step. None for no further limit.
        """
        step: Step[J] = Step(failed=self._refused)
        self._refused = []
        self._expire(step, now)
        self._give_up_a_place(step)
        given_up = len(step.preempted)
        self._decode(step)
        budget = self._max_tokens - len(step.decode)
        if step.decode:
            budget = min(budget, self._prefill_chunk)
        if max_prefill is not None:
            budget = min(budget, max_prefill)
        if len(step.preempted) == given_up and budget > 0:  # no job is admitted while the pool is full
            self._admit(step)
        self._prefill(step, budget)
        return step

    def charge(self, job: J, tokens: int) -> None:
        """Charge tokens beyond those of the step to a job's tenant."""
        self._shares.charge(job, tokens)

    def again(self, now: float, leaving: Collection[J]) -> Step[J] | None:
        """Return the next step without scheduling: one more token for all running jobs except ``leaving``.

        Returns None if a job could be admitted, could end otherwise or has prompt tokens left, or if the pool is full.
        """
        self._wake()
        decode = [job for job in self.running if job not in leaving]
        places = max(0, self._max_requests - sum(job.sequences for job in self.running))
        if (
            not decode
            or self._refused
            or (self._deadlines and self._deadlines[0][0] <= now)
            or any(job.prompt_left for job in self.running)
            or any(sequences <= places and self._first(sequences) for sequences in self._heads)
            or self._crowded_out() is not None
            or not all(self._memory.grow(job) for job in decode)
        ):
            return None
        for job in decode:
            self._shares.charge(job, 1)
        return Step(decode=decode)

    def _expire(self, step: Step[J], now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heappop(self._deadlines)[2]()
            if job is not None and job in self._line:
                self.remove(job)
                step.expired.append(job)

    def _await_deadline(self, job: J, deadline: float) -> None:
        heappush(self._deadlines, (deadline, self._count, ref(job)))
        if len(self._deadlines) > 2 * len(self._line) + _FEW:  # drop the entries of jobs that left
            self._deadlines = [entry for entry in self._deadlines if entry[2]() in self._line]
            heapify(self._deadlines)

    def _give_up_a_place(self, step: Step[J]) -> None:
        """Preempt one job of a tenant with more than its share of the slots, for a tenant with less."""
        tenant = self._crowded_out()
        if tenant is not None:
            self.preempt(next(job for job in reversed(self.running) if job.tenant == tenant and job.sequences), step)

    def _crowded_out(self) -> str | None:
        """The tenant that must give up a slot; None if none must."""
        if sum(count for count, _ in self._places.values()) < self._max_requests:
            return None
        found = [first for sequences in self._heads if sequences and (first := self._first(sequences)) is not None]
        if not found:
            return None
        head = self._queues[min(found)[1]][0]
        return crowded_out(self._places, head.tenant, head.weight)

    def _decode(self, step: Step[J]) -> None:
        gone: set[J] = set()
        for job in list(self.running):
            if job.prompt_left or job in gone:
                continue
            while not self._memory.grow(job):
                last = self.running[-1]
                gone.add(last)
                self.preempt(last, step)
                if last is job:
                    break
            else:
                step.decode.append(job)
        step.decode = [job for job in step.decode if job not in gone]
        for job in step.decode:
            self._shares.charge(job, 1)

    def _prefill(self, step: Step[J], budget: int) -> None:
        prompts = [job for job in self.running if job.prompt_left]
        tokens = self._shares.split(prompts, max(0, budget))
        step.prefill = [(job, tokens[job]) for job in prompts if tokens.get(job)]

    def _admit(self, step: Step[J]) -> None:
        self._wake()
        places = self._max_requests - sum(job.sequences for job in self.running)
        # the most jobs to park in a step, so that a long queue is not searched at once
        looks = max(1, self._max_requests - 1)
        stuck: dict[str, J] = {}  # the refused job of each tenant
        taken: set[int] = set()  # numbers of sequences that may not start any more
        aside: list[tuple[_Turn, _Key]] = []  # queues of refused tenants
        while looks and (key := self._next(places, stuck, taken, aside)) is not None:
            job = self._queues[key][0]
            known = Admission.NO_ROOM if job in self._no_room else Admission.FREEING if job in self._freeing else None
            answer = known or self._ask(job, step)
            if answer is Admission.TAKEN:
                taken.add(job.sequences)
            elif answer in (Admission.NO_ROOM, Admission.FREEING):
                (self._no_room if answer is Admission.NO_ROOM else self._freeing).add(job)
                stuck[job.tenant] = job
                if not self._may_overtake(stuck):
                    break
            elif answer in (Admission.LATER, Admission.COMING):
                assert answer is Admission.COMING or self.running, "a job waits for what nobody computes"
                looks -= job not in self._asked
                self._park(job, answer)
            elif answer is Admission.ADMITTED:
                places -= job.sequences
                for other in stuck.values():
                    self._overtaken[other] += 1
                if not self._may_overtake(stuck):
                    break
        for turn, key in aside:
            heappush(self._heads[key[1]], (turn, key))

    def _next(
        self, places: int, stuck: Container[str], taken: Container[int], aside: list[tuple[_Turn, _Key]]
    ) -> _Key | None:
        """The queue with the job to ask next; None if there is none. Skipped heap entries are moved to ``aside``."""
        found: list[tuple[_Turn, _Key]] = []
        for sequences, heap in self._heads.items():
            if sequences > max(0, places) or sequences in taken:
                continue
            while (first := self._first(sequences)) is not None and first[1][0] in stuck:
                aside.append(heappop(heap))
            if first is not None:
                found.append(first)
        return min(found)[1] if found else None

    def _first(self, sequences: int) -> tuple[_Turn, _Key] | None:
        """The earliest queue of jobs with this number of sequences, with its turn."""
        heap = self._heads[sequences]
        while heap:
            turn, key = heap[0]
            queue = self._queues.get(key)
            if queue is None:
                heappop(heap)
                continue
            now = self.turn(queue[0])
            if now == turn:
                return turn, key
            heapreplace(heap, (now, key))
        return None

    def _note_turn(self, key: _Key) -> None:
        """Record that the turn of a queue's first job may have fallen."""
        heap = self._heads.setdefault(key[1], [])
        heappush(heap, (self.turn(self._queues[key][0]), key))
        if len(heap) > _STALE + 4 * len(self._queues):
            heap[:] = [(self.turn(queue[0]), each) for each, queue in self._queues.items() if each[1] == key[1]]
            heapify(heap)

    def _park(self, job: J, answer: Admission) -> None:
        """Stop asking a job until its wait for a lower tier or another job is over."""
        self._leave_queue(job)
        self._parked[job] = None
        self._asked.add(job)
        if self._waits is not None:
            self._waits.begun(job, answer)

    def _wake(self) -> None:
        """Return parked and refused jobs to the queues if their wait may be over."""
        for job in list(self._parked) if self._waits is None else self._waits.over(alone=not self.running):
            if job in self._parked:
                del self._parked[job]
                self._join_queue(job)
        room = object() if self._waits is None else self._waits.room
        if room != self._room:
            self._room = room
            self._freeing.clear()

    def _may_have_room(self) -> None:
        self._no_room.clear()
        self._freeing.clear()

    def _may_overtake(self, stuck: dict[str, J]) -> bool:
        """True if jobs of other tenants may overtake the jobs in ``stuck``, which found no room, by tenant.

        Each stuck job may be overtaken ``max_requests`` times. Without this limit, a large job could wait for ever.
        The number of stuck tenants is limited too, because the search for room in a full pool takes time.
        """
        return len(stuck) < _STUCK and all(
            self._overtaken.setdefault(job, 0) < self._max_requests for job in stuck.values()
        )

    def _ask(self, job: J, step: Step[J]) -> Admission | None:
        """Ask the memory to admit a waiting job, and start it if admitted. Returns the answer; None if it has left."""
        try:
            answer = self._memory.admit(job, alone=not self.running)
            if answer is Admission.ADMITTED:
                self._start(job)
        except Exception as error:  # it can never run, or its request has a fault; only this job ends
            self.remove(job)
            step.failed.append((job, error))
            return None
        if answer is Admission.DONE:
            self.remove(job)
            step.done.append(job)
            return None
        if answer is Admission.NO_ROOM and not self.running:
            self.remove(job)
            step.failed.append((job, CapacityError(_ALONE)))
            return None
        return answer

    def _start(self, job: J) -> None:
        """Start an admitted job. If that fails, its allocation is freed and it waits as before."""
        try:
            insort(self.running, job, key=self._line.__getitem__)
            self._take_places(job, job.sequences)
            self._unqueue(job)
            self._overtaken.pop(job, None)
            self._begun.add(job)
        except BaseException:  # Ctrl-C may be raised anywhere
            try:
                self._memory.release(job)
            finally:
                if job in self.running:
                    self.running.remove(job)
                    self._take_places(job, -job.sequences)
                self._queue(job)
            raise

    def turn(self, job: J) -> _Turn:
        """The order of admission; the lowest goes first."""
        running = self._places.get(job.tenant, (0, 0.0))[0]
        return running / job.weight, self._shares.of(job.tenant), self._line[job]

    def _put_out_for(self, job: J) -> bool:
        """Remove a job from a full queue for a tenant with less than its share. Returns True if one was removed."""
        counts: dict[str, tuple[int, float]] = {}
        for other in self.waiting:
            counts[other.tenant] = counts.get(other.tenant, (0, 0.0))[0] + 1, other.weight
        tenant = crowded_out(counts, job.tenant, job.weight)
        mine = (other for other in reversed(self.waiting) if other.tenant == tenant and other.sequences == 1)
        last = next((other for other in mine if other not in self._begun), None)
        if last is None:
            return False
        self.remove(last)
        message = "the queue is full, and other tenants need their share of it; send the request again later"
        self._refused.append((last, QueueFullError(message)))
        return True

    def _leave(self, job: J) -> None:
        self.running.remove(job)
        self._take_places(job, -job.sequences)
        self._may_have_room()
        self._memory.release(job)

    def _take_places(self, job: J, places: int) -> None:
        """Add slots in the batch to a job's tenant; a negative number frees slots."""
        count = self._places.get(job.tenant, (0, 0.0))[0] + places
        if count:
            self._places[job.tenant] = count, job.weight
        else:
            self._places.pop(job.tenant, None)
        if places < 0:
            for sequences in self._heads:
                if (job.tenant, sequences) in self._queues:
                    self._note_turn((job.tenant, sequences))

    def _line_up(self, job: J) -> None:
        """Give a job its position and queue it."""
        self._count += 1
        self._line[job] = (job.priority, job.arrival, self._count)
        self._queue(job)

    def _queue(self, job: J) -> None:
        _insert(self.waiting, job, self._line)
        self._join_queue(job)

    def _join_queue(self, job: J) -> None:
        key = job.tenant, job.sequences
        queue = self._queues.setdefault(key, [])
        _insert(queue, job, self._line)
        if queue[0] is job:
            self._note_turn(key)

    def _unqueue(self, job: J) -> None:
        del self.waiting[bisect_left(self.waiting, self._line[job], key=self._line.__getitem__)]
        if job in self._parked:
            del self._parked[job]
        else:
            self._leave_queue(job)

    def _leave_queue(self, job: J) -> None:
        key = job.tenant, job.sequences
        queue = self._queues[key]
        del queue[bisect_left(queue, self._line[job], key=self._line.__getitem__)]
        if not queue:
            del self._queues[key]


def _insert(line: list[J], job: J, places: Mapping[J, tuple[int, float, int]]) -> None:
    """Insert a job in queue order, unless it is still there after a failed start."""
    at = bisect_left(line, places[job], key=places.__getitem__)
    if at == len(line) or line[at] is not job:
        line.insert(at, job)
