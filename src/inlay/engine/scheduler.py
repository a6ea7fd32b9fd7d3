"""Which requests run in the next step: iteration-level batching, decided anew before every forward pass.

Pure logic: jobs say what they still need, a memory says whether there is room, and time is an argument. In this order:

1. jobs past their deadline end
2. where all places are taken and a tenant has fewer than its share, the one that has most gives one up: its last job
   is preempted, which means that it loses its place in the pool and waits to be computed again
3. every answer that is under way gets its next token; where the pool has no chunk left for one, the job that comes
   last in line is preempted
4. waiting jobs are admitted while there is budget, a place in the batch and room in the pool
5. prompts get what the token budget leaves, divided as fairness.py says, so that no long prompt holds up answers or
   newcomers

Jobs stand in line by priority (a lower number first), then by arrival. Of several tenants the one with the fewest
running jobs for its weight is admitted from first. One that has no room waits for it, and all of its tenant behind it;
of other tenants, as many as run at once may go before it. One that waits for a lower tier, or for what another job
computes, takes no place and holds up nobody; it is asked again when that is over.

The line is shared, too: where it is full, a tenant with
fewer jobs in it than its share puts out the last job of the tenant that has most, which ends with QueueFullError.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Container, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic
from weakref import ReferenceType, ref

from inlay.engine.fairness import Shares, crowded_out
from inlay.engine.jobs import Admission, J, Memory, Step, Waits
from inlay.errors import CapacityError, QueueFullError

#: Of a queue, whose and of how many sequences; of a job, the lower the earlier it is admitted.
_Key = tuple[str, int]
_Turn = tuple[float, float, tuple[int, float, int]]

_FEW = 64  # deadlines that are never worth looking through
_STALE = 64  # entries of a heap of queues that are never worth dropping
_STUCK = 4  # so many tenants are told in a step that there is no room, at most
_ALONE = "the KV pool has no room for this request beside what is held in it; give a larger kv_memory"


class Scheduler(Generic[J]):
    """Waiting and running jobs.

    max_requests: the most that run at the same time.
    max_tokens: the most tokens of one step.
    prefill_chunk: the most prompt tokens of a step in which others answer.
    max_waiting: the most that wait; None for no bound.
    waits: says when jobs that wait are to be asked again; None where that is at every step.
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
        self._line: dict[J, tuple[int, float, int]] = {}  # every job with its place in line
        self._count = 0
        self._jobs: Counter[str] = Counter()  # of every tenant that has any
        self._queues: dict[_Key, list[J]] = {}  # who may be asked, by tenant and sequences, in line
        # By sequences, the queues by the turn of their first job. A turn that has risen is corrected when its entry
        # comes first; where one may have fallen, an entry is added.
        self._heads: dict[int, list[tuple[_Turn, _Key]]] = {}
        self._parked: dict[J, None] = {}  # who waits for a lower tier or another job, and is not asked
        self._asked: set[J] = set()  # who was parked once
        self._places: dict[str, tuple[int, float]] = {}  # of every tenant that runs, how many it has, and its weight
        self._begun: set[J] = set()  # who was admitted once
        self._refused: list[tuple[J, Exception]] = []  # who was put out of the line since the last step
        self._no_room: set[J] = set()  # who was told so since somebody left: until then they need not ask again
        self._freeing: set[J] = set()  # the same of those for whom room comes back
        self._room: object = None  # of ``waits``, when these were told
        self._overtaken: dict[J, int] = {}  # of those who were told so and wait: by how many of other tenants
        self._deadlines: list[tuple[float, int, ReferenceType[J]]] = []  # a heap, with those who left; it keeps nobody
        self.waiting: list[J] = []
        self.running: list[J] = []

    @property
    def busy(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self.running or self.waiting or self._refused)

    def oldest(self) -> float | None:
        """When the oldest of all jobs was sent; None without any."""
        return min((job.sent for job in self._line), default=None)

    def add(self, job: J) -> None:
        """Let a job stand in line. Raises QueueFullError."""
        if self._max_waiting is not None and len(self.waiting) >= self._max_waiting and not self._put_out_for(job):
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already, as many as max_waiting allows")
        if not self._jobs[job.tenant]:
            self._shares.join(job.tenant, {tenant for tenant, count in self._jobs.items() if count})
        self._jobs[job.tenant] += 1
        self._line_up(job)
        if job.deadline is not None:
            self._await_deadline(job, job.deadline)

    def remove(self, job: J) -> None:
        """Forget a job, wherever it stands, and take back what it has; nothing for one that is not known."""
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
        finally:  # a fault of the memory's must not leave half a job behind
            del self._line[job]
            self._begun.discard(job)
            self._asked.discard(job)
            self._jobs[job.tenant] -= 1
            if not self._jobs[job.tenant]:
                del self._jobs[job.tenant]

    def requeue(self, job: J) -> None:
        """Take back what a running job has, and let it stand in line again as one that has just come."""
        try:
            self._leave(job)
        finally:
            self._line_up(job)

    def preempt(self, job: J, step: Step[J]) -> None:
        """Take back what a running job has, and note in ``step`` that it waits again, at its old place in line."""
        try:
            self._leave(job)
        finally:
            self._queue(job)
        step.preempted.append(job)

    def step(self, now: float, max_prefill: int | None = None) -> Step[J]:
        """Decide on the next forward pass.

        now: on the clock of arrivals and deadlines. max_prefill: the most prompt tokens of this step; None for no
        further bound.
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
        if len(step.preempted) == given_up and budget > 0:  # where the pool is full, nobody joins
            self._admit(step)
        self._prefill(step, budget)
        return step

    def again(self, now: float, leaving: Collection[J]) -> Step[J] | None:
        """The next step where there is nothing to decide: one more token of all who answer but those who are leaving.

        None where somebody could join, leaves otherwise, or has a prompt to compute, and where the pool is full.
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
        if len(self._deadlines) > 2 * len(self._line) + _FEW:  # entries of those who left would stay
            self._deadlines = [entry for entry in self._deadlines if entry[2]() in self._line]
            heapify(self._deadlines)

    def _give_up_a_place(self, step: Step[J]) -> None:
        """Preempt one job of a tenant that has more than its share of the places, for one that has less."""
        tenant = self._crowded_out()
        if tenant is not None:
            self.preempt(next(job for job in reversed(self.running) if job.tenant == tenant and job.sequences), step)

    def _crowded_out(self) -> str | None:
        """The tenant that has to give up a place; None for nobody."""
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
        looks = max(1, self._max_requests - 1)  # at jobs that then wait: a long line is not looked through at once
        stuck: dict[str, J] = {}  # who has no room, by tenant
        taken: set[int] = set()  # of how many sequences no more may run
        aside: list[tuple[_Turn, _Key]] = []  # queues of tenants that are stuck
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
        """The queue whose first job is asked next; None for nobody. aside: takes entries that are passed over."""
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
        """The queue of jobs of so many sequences whose first job has its turn next."""
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
        """Note that the turn of a queue's first job may be an earlier one than before."""
        heap = self._heads.setdefault(key[1], [])
        heappush(heap, (self.turn(self._queues[key][0]), key))
        if len(heap) > _STALE + 4 * len(self._queues):
            heap[:] = [(self.turn(queue[0]), each) for each, queue in self._queues.items() if each[1] == key[1]]
            heapify(heap)

    def _park(self, job: J, answer: Admission) -> None:
        """Ask a job that waits for a lower tier, or another job, no more until that is over."""
        self._leave_queue(job)
        self._parked[job] = None
        self._asked.add(job)
        if self._waits is not None:
            self._waits.begun(job, answer)

    def _wake(self) -> None:
        """Let those be asked again for whom something may have changed."""
        for job in list(self._parked) if self._waits is None else self._waits.over():
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
        """Whether jobs of further tenants may go before those that have no room. stuck: them, by tenant.

        As many as run at once may do so. After them nobody does until there is room: a large request would wait for
        ever otherwise. And few are asked, since looking for room in a full pool takes time.
        """
        return len(stuck) < _STUCK and all(
            self._overtaken.setdefault(job, 0) < self._max_requests for job in stuck.values()
        )

    def _ask(self, job: J, step: Step[J]) -> Admission | None:
        """Whether a job that waits can run now, and see to it that it does; None for one that has left."""
        try:
            answer = self._memory.admit(job)
            if answer is Admission.ADMITTED:
                self._start(job)
        except Exception as error:  # it can never run, or there is a fault in what it asks for: its end, alone
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
        """Let a job that was admitted run. Where that fails, it waits as before and has nothing of the pool."""
        try:
            insort(self.running, job, key=self._line.__getitem__)
            self._take_places(job, job.sequences)
            self._unqueue(job)
            self._overtaken.pop(job, None)
            self._begun.add(job)
        except BaseException:  # Ctrl-C may come anywhere
            try:
                self._memory.release(job)
            finally:
                if job in self.running:
                    self.running.remove(job)
                    self._take_places(job, -job.sequences)
                self._queue(job)
            raise

    def turn(self, job: J) -> _Turn:
        """The lower, the earlier it is admitted."""
        running = self._places.get(job.tenant, (0, 0.0))[0]
        return running / job.weight, self._shares.of(job.tenant), self._line[job]

    def _put_out_for(self, job: J) -> bool:
        """Make room in a full line for a tenant that has less than its share of it. Returns whether there is now."""
        counts: dict[str, tuple[int, float]] = {}
        for other in self.waiting:
            counts[other.tenant] = counts.get(other.tenant, (0, 0.0))[0] + 1, other.weight
        tenant = crowded_out(counts, job.tenant, job.weight)
        mine = (other for other in reversed(self.waiting) if other.tenant == tenant and other.sequences == 1)
        last = next((other for other in mine if other not in self._begun), None)
        if last is None:
            return False
        self.remove(last)
        message = "the line of waiting requests is full, and others need a part of it; send the request again later"
        self._refused.append((last, QueueFullError(message)))
        return True

    def _leave(self, job: J) -> None:
        self.running.remove(job)
        self._take_places(job, -job.sequences)
        self._may_have_room()
        self._memory.release(job)

    def _take_places(self, job: J, places: int) -> None:
        """Count places of a job's tenant in the batch; below 0 where it gives them back."""
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
        """Give a job its place in line, and let it wait."""
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
    """Let a job stand at its place in a line, unless it does already, as after a start that failed."""
    at = bisect_left(line, places[job], key=places.__getitem__)
    if at == len(line) or line[at] is not job:
        line.insert(at, job)
