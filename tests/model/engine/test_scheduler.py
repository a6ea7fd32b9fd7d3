"""The scheduler under random arrivals, cancellations, deadlines and memory, with a clock that the test turns."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.engine.scheduler import Admission, Scheduler, Step
from inlay.errors import QueueFullError
from tests.counting import calls_of
from tests.raising import raises
from tests.unit.engine.fakes import FakeJob, FakeMemory, make, run


class Machine(RuleBasedStateMachine):
    """Jobs arrive and end at random; the rules at the top of scheduler.py hold in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.memory = make(waiting=12)
        self.now, self.count = 0.0, 0
        self.alive: set[FakeJob] = set()  # jobs that have neither ended nor been removed

    @rule(
        prompt=st.integers(1, 30),
        answer=st.integers(1, 12),
        priority=st.integers(-1, 1),
        patience=st.none() | st.integers(0, 20),
        topic=st.none() | st.integers(0, 2),
    )
    def arrive(self, prompt, answer, priority, patience, topic):
        deadline = None if patience is None else self.now + patience
        job = FakeJob(self.count, prompt, answer, priority, self.now, deadline, topic)
        self.count += 1
        full = len(self.scheduler.waiting) >= 12
        try:
            self.scheduler.add(job)
        except QueueFullError:
            assert full
        else:
            assert not full
            self.alive.add(job)

    @rule(number=st.integers(0, 1000))
    @precondition(lambda self: self.alive)
    def cancel(self, number):
        job = sorted(self.alive, key=lambda job: job.number)[number % len(self.alive)]
        self.scheduler.remove(job)
        self.scheduler.remove(job)  # a second time does nothing
        self.alive.remove(job)
        assert job not in self.memory.held

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds):
        self.now += seconds

    @rule(times=st.integers(1, 6))
    def work(self, times):
        for _ in range(times):
            self.one_step()

    def one_step(self) -> Step[FakeJob]:
        line = sorted(self.scheduler.waiting, key=lambda job: job.place)
        before = set(self.scheduler.running)
        answering = [job for job in self.scheduler.running if not job.prompt_left]
        left = {job: job.prompt_left for job in self.scheduler.running}
        again = self.scheduler.again(self.now, ())
        self.memory.asked.clear()
        step = self.scheduler.step(self.now)
        assert again is None or again == step, "there was something to decide"
        self.check_budget(step, left)
        self.check_running(step, answering)
        self.check_ended(step)
        self.check_queue_order(step, line, before)
        run(self.scheduler, self.memory, step)
        self.alive = {job for job in self.alive if job.said < job.answer}
        return step

    def check_budget(self, step: Step[FakeJob], left: dict[FakeJob, int]) -> None:
        prompts = sum(tokens for _, tokens in step.prefill)
        assert len(step.decode) + prompts <= 8
        assert not step.decode or prompts <= 4
        assert all(tokens > 0 for _, tokens in step.prefill)
        assert all(tokens <= left.get(job, job.prompt_left) for job, tokens in step.prefill)

    def check_running(self, step: Step[FakeJob], answering: list[FakeJob]) -> None:
        ran = [*step.decode, *(job for job, _ in step.prefill)]
        assert len(ran) == len(set(ran)), "a job ran twice in one step"
        assert set(ran) <= set(self.scheduler.running)
        assert len(self.scheduler.running) <= 4
        gone = {*step.preempted, *step.expired}
        assert set(step.decode) == set(answering) - gone, "an answer under way gets its next token in every step"

    def check_ended(self, step: Step[FakeJob]) -> None:
        expired = {job for job in self.alive if job.deadline is not None and job.deadline <= self.now}
        assert set(step.expired) == expired
        failed = {job for job, _ in step.failed}
        assert all(job.prompt + job.said + 1 > 20 for job in failed), "it would have fitted"
        self.alive -= expired | failed
        assert not (expired | failed) & set(self.memory.held)
        for job in step.preempted:
            assert job in self.scheduler.waiting
            assert all(other.place < job.place for other in self.scheduler.running), "the last in line goes first"

    def check_queue_order(self, step: Step[FakeJob], line: list[FakeJob], before: set[FakeJob]) -> None:
        """Jobs are asked in the order of the queue, and none after a job that has no room."""
        asked = [job for job, _ in self.memory.asked]
        assert asked == sorted(asked, key=lambda job: job.place)
        # Those in front of the last that was asked were asked too, or had left before.
        gone = set(step.expired) | {job for job, _ in step.failed}
        places = {job: n for n, job in enumerate(line)}
        for n, job in enumerate(asked):
            assert set(line[: places[job]]) - gone <= set(asked[:n])
        answers = [answer for _, answer in self.memory.asked]
        assert Admission.NO_ROOM not in answers[:-1]
        joined = set(self.scheduler.running) - before
        assert joined == {job for job, answer in self.memory.asked if answer is Admission.ADMITTED}
        assert not (step.preempted and asked), "nobody joins in a step in which somebody had to go"

    @invariant()
    def no_request_is_lost(self):
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len(running) + len(waiting) == len(self.alive)
        assert {*running, *waiting} == self.alive
        assert set(self.memory.held) == set(running)
        for jobs in (running, waiting):
            assert jobs == sorted(jobs, key=lambda job: job.place)

    def teardown(self) -> None:
        """Without new arrivals, every job ends."""
        work = sum(job.prompt + job.answer for job in self.alive)
        # In the worst case each generated token is followed by a preemption that recomputes the whole job.
        steps = (1 + work) * (1 + max((job.prompt + job.answer for job in self.alive), default=0))
        while self.alive and steps:
            self.one_step()
            self.no_request_is_lost()
            steps -= 1
        assert not self.alive, "somebody never ends"
        assert self.memory.free == self.memory.chunks


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def jobs(*sizes: tuple[int, int], **more) -> list[FakeJob]:
    return [FakeJob(number, prompt, answer, **more) for number, (prompt, answer) in enumerate(sizes)]


def add(scheduler: Scheduler[FakeJob], *some: FakeJob) -> None:
    for job in some:
        scheduler.add(job)


def test_long_prompt_does_not_delay_answers():
    scheduler, memory = make(chunks=100)
    short, long = jobs((2, 9), (30, 1))
    add(scheduler, short)
    run(scheduler, memory, scheduler.step(0))
    add(scheduler, long)
    for _ in range(5):
        step = scheduler.step(0)
        assert (step.decode, step.prefill) == ([short], [(long, 4)])
        run(scheduler, memory, step)


def test_lone_prompt_gets_the_whole_budget():
    scheduler, _ = make(chunks=100)
    (long,) = jobs((30, 1))
    add(scheduler, long)
    assert scheduler.step(0).prefill == [(long, 8)]


def test_priority_goes_before_arrival():
    scheduler, _ = make(requests=1)
    late, urgent, early = (FakeJob(n, 2, 5, p, a) for n, (p, a) in enumerate([(0, 2.0), (-1, 3.0), (0, 1.0)]))
    add(scheduler, late, urgent, early)
    assert scheduler.waiting == [urgent, early, late]
    assert [job for job, _ in scheduler.step(3).prefill] == [urgent]


def test_last_in_the_queue_is_preempted_and_resumes_first():
    scheduler, memory = make(chunks=10, requests=3)
    first, second, third = jobs((3, 7), (3, 7), (1, 7))
    add(scheduler, first, second)
    run(scheduler, memory, scheduler.step(0))
    add(scheduler, third)
    preempted = []
    for _ in range(40):
        step = scheduler.step(0)
        if step.preempted:
            preempted += step.preempted
            assert scheduler.waiting[0] is min(scheduler.waiting, key=lambda job: job.place)
        run(scheduler, memory, step)
    assert preempted
    assert first not in preempted
    assert [job.said for job in (first, second, third)] == [7, 7, 7]


def test_request_without_memory_is_not_overtaken():
    scheduler, memory = make(chunks=10)
    first, large, small = jobs((4, 9), (8, 1), (1, 1))
    add(scheduler, first, large, small)
    run(scheduler, memory, scheduler.step(0))
    assert scheduler.waiting == [large, small]
    run(scheduler, memory, scheduler.step(0))
    assert scheduler.waiting == [large, small]


def test_request_without_memory_is_retried_after_a_release():
    """Looking for room in a full pool takes time, and there is none before."""
    scheduler, memory = make(chunks=10)
    first, large = jobs((4, 5), (8, 1))
    add(scheduler, first, large)
    for _ in range(7):
        run(scheduler, memory, scheduler.step(0))
    assert [job.said for job in (first, large)] == [5, 1]
    answers = [Admission.ADMITTED, Admission.NO_ROOM, Admission.ADMITTED]
    assert [answer for _, answer in memory.asked] == answers


def test_request_waiting_for_a_shared_prefix_is_overtaken():
    scheduler, memory = make(chunks=100)
    first, alike, other = jobs((20, 1), (20, 1), (2, 1))
    first.topic = alike.topic = 1
    add(scheduler, first)
    run(scheduler, memory, scheduler.step(0))
    add(scheduler, alike, other)
    for _ in range(9):
        run(scheduler, memory, scheduler.step(0))
    assert [job.said for job in (first, alike, other)] == [1, 1, 1]
    assert first.admitted == alike.admitted == other.admitted == 1
    answers = [(job, answer) for job, answer in memory.asked if job is not first]
    assert answers[0] == (alike, Admission.LATER)
    assert answers.index((other, Admission.ADMITTED)) < answers.index((alike, Admission.ADMITTED))


@pytest.mark.parametrize("answer", [Admission.LATER, Admission.COMING])
def test_waiting_request_takes_no_slot_and_is_retried_on_a_change(answer):
    class Waits:
        room = 0

        def __init__(self) -> None:
            self.told, self.woken = [], []

        def begun(self, job, said):
            self.told.append((job, said))

        def over(self, alone):
            woken, self.woken = self.woken, []
            return woken

    memory, waits = FakeMemory(1000), Waits()
    scheduler = Scheduler(4, 64, 64, None, memory, waits)
    first, *waiting = jobs((4, 50), *[(4, 5)] * 6)
    say, told = memory.admit, set(waiting)
    memory.admit = lambda job, alone: answer if job in told else say(job, alone)
    add(scheduler, first, *waiting)
    for _ in range(10):
        run(scheduler, memory, scheduler.step(0))
    assert sorted(job.number for job, _ in waits.told) == [1, 2, 3, 4, 5, 6], "each once"
    (other,) = jobs((4, 1))
    other.number, other.tenant = 9, "other"
    add(scheduler, other)
    run(scheduler, memory, scheduler.step(0))
    assert other.said == 1
    told.clear()
    waits.woken = [*waiting]
    run(scheduler, memory, scheduler.step(0))
    assert [job.admitted for job in waiting] == [1, 1, 1, 0, 0, 0], "three places are left, in the order of the line"
    scheduler.remove(waiting[5])
    while scheduler.busy:
        run(scheduler, memory, scheduler.step(0))
    assert [job.said for job in waiting] == [5] * 5 + [0]


@pytest.mark.parametrize("sequences", [0, 1])
def test_step_looks_at_few_of_many_waiting_tenants(sequences, monkeypatch):
    scheduler, memory = make(chunks=10**6, requests=2, tokens=64, prefill=64)
    say = memory.admit
    memory.admit = lambda job, alone: Admission.TAKEN if not job.sequences else say(job, alone)
    add(scheduler, *jobs((4, 1000), (4, 1000)))
    run(scheduler, memory, scheduler.step(0))
    add(scheduler, *(FakeJob(10 + n, 4, 1, tenant=f"t{n}", sequences=sequences, priority=1) for n in range(2000)))
    looked = calls_of(monkeypatch, Scheduler, "turn")
    monkeypatch.setattr("inlay.engine.scheduler.crowded_out", lambda *_: None)
    for _ in range(10):
        run(scheduler, memory, scheduler.step(0))
    assert len(looked) < 100


def test_request_that_never_fits_fails_and_others_continue():
    scheduler, _ = make(chunks=10)
    never, small = jobs((50, 1), (2, 1))
    add(scheduler, never, small)
    step = scheduler.step(0)
    ((job, error),) = step.failed
    assert (job, str(error)) == (never, "job 0 never fits")
    assert step.prefill == [(small, 2)]
    assert not scheduler.waiting


def test_request_outgrowing_the_pool_fails():
    scheduler, memory = make(chunks=10)
    (job,) = jobs((4, 50))
    add(scheduler, job)
    failed = []
    for _ in range(100):
        step = scheduler.step(0)
        failed += step.failed
        run(scheduler, memory, step)
    assert [job for job, _ in failed] == [job]
    assert memory.free == 10
    assert not scheduler.running
    assert not scheduler.waiting


def test_full_pool_without_running_requests_is_an_error():
    scheduler, memory = make(chunks=10)
    memory.held[FakeJob(99, 1, 1)] = 8  # a reference from outside the scheduler
    (job,) = jobs((4, 1))
    add(scheduler, job)
    ((failed, error),) = scheduler.step(0).failed
    assert failed is job
    assert "has no room for this request beside what is held in it; give a larger kv_memory" in str(error)


def test_waiting_without_a_computing_request_fails_an_assertion():
    """If the memory returned LATER while no job computes, its callers would wait forever."""
    scheduler, memory = make()
    memory.answer = lambda job: Admission.LATER
    add(scheduler, *jobs((4, 1)))
    with pytest.raises(AssertionError, match="waits for what nobody computes"):
        scheduler.step(0)


def test_queue_is_not_scanned_while_it_waits():
    scheduler, memory = make(chunks=1000, requests=4, tokens=2)
    alike = jobs(*[(50, 1)] * 100, topic=1)
    add(scheduler, *alike)
    scheduler.step(0)
    assert len(memory.asked) <= 4


def test_expired_requests_leave_within_a_step_and_release_memory():
    scheduler, memory = make()
    running, waiting = FakeJob(0, 4, 50, deadline=5.0), FakeJob(1, 18, 1, deadline=5.0)
    add(scheduler, running, waiting)
    run(scheduler, memory, scheduler.step(4.9))
    assert memory.held
    step = scheduler.step(5.0)
    assert step.expired == [running, waiting]
    assert not step.decode
    assert not memory.held
    assert not scheduler.running
    assert not scheduler.waiting


def test_full_queue_rejects_a_request_completely():
    scheduler, _ = make(waiting=2)
    one, two, three = jobs((1, 1), (1, 1), (1, 1))
    add(scheduler, one, two)
    with raises("engine.queue_full", QueueFullError, names="2"):
        scheduler.add(three)
    scheduler.remove(three)
    assert scheduler.waiting == [one, two]


def test_request_without_memory_does_not_block_other_tenants():
    scheduler, memory = make(chunks=20, requests=3)
    first = FakeJob(0, 4, 50, tenant="a")
    add(scheduler, first)
    run(scheduler, memory, scheduler.step(0))
    large, behind = FakeJob(1, 17, 1, tenant="b"), FakeJob(2, 1, 1, tenant="b")
    small = [FakeJob(3 + n, 1, 1, tenant="c") for n in range(6)]
    add(scheduler, large, behind, *small)
    for now in range(9):
        run(scheduler, memory, scheduler.step(now))
    assert [job.said for job in small] == [1, 1, 1, 0, 0, 0], "as many as run at once, and no more"
    assert (large.said, behind.said) == (0, 0)
    scheduler.remove(first)
    for now in range(9, 20):
        run(scheduler, memory, scheduler.step(now))
    assert (large.said, behind.said) == (1, 1)
    assert [job.said for job in small] == [1] * 6


def test_few_of_many_tenants_without_memory_are_retried():
    scheduler, memory = make(chunks=20, requests=100)
    add(scheduler, FakeJob(0, 4, 50, tenant="a"))
    run(scheduler, memory, scheduler.step(0))
    add(scheduler, *(FakeJob(1 + n, 18, 1, tenant=str(n)) for n in range(50)))
    memory.asked.clear()
    for now in range(5):
        run(scheduler, memory, scheduler.step(now))
    assert len(memory.asked) == 4


class Timed(FakeJob):
    """Counts how often deadlines are read."""

    looks = 0

    def __getattribute__(self, name):
        Timed.looks += name == "deadline"
        return super().__getattribute__(name)


@pytest.mark.parametrize("topic", [None, 1])
def test_step_does_not_scan_all_tenants_for_each_job(monkeypatch, topic):
    scheduler, _ = make(chunks=10**6, requests=100, tokens=100, prefill=100)
    looked = calls_of(monkeypatch, Scheduler, "turn")
    add(scheduler, *(FakeJob(number, 1000, 2, tenant=f"t{number}", topic=topic) for number in range(400)))
    scheduler.step(0)
    assert len(scheduler.running) == (100 if topic is None else 1)
    assert 400 <= len(looked) < 1000


def test_joining_a_long_queue_compares_few_requests():
    compared: list[object] = []

    class Compared(FakeJob):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

        __hash__ = object.__hash__

    scheduler, _ = make(requests=1)
    some = [Compared(number, 4, 2, priority=number % 3) for number in range(200)]
    add(scheduler, *some)
    assert scheduler.waiting == sorted(some, key=lambda job: job.place)
    compared.clear()
    add(scheduler, *(Compared(number, 4, 2, priority=number % 3) for number in range(200, 400)))
    assert len(compared) < 1000


def test_step_does_not_scan_all_deadlines():
    scheduler, memory = make(chunks=100, requests=1)
    add(scheduler, *(Timed(n, 1, 1000, deadline=100.0 + n) for n in range(2000)))
    Timed.looks = 0
    for now in range(10):
        run(scheduler, memory, scheduler.step(now))
    assert Timed.looks < 100
    assert [job.number for job in scheduler.step(105.0).expired] == [0, 1, 2, 3, 4, 5]


def test_removed_request_is_not_kept_until_its_deadline():
    scheduler, _ = make()
    jobs = weakref.WeakSet()
    for number in range(1000):
        job = FakeJob(number, 1, 1, deadline=1e9)
        jobs.add(job)
        scheduler.add(job)
        scheduler.remove(job)
    gc.collect()
    assert len(jobs) <= 1  # the last one, by its name here


@pytest.mark.parametrize("way", ["remove", "requeue", "preempt"])
def test_fault_while_releasing_memory_leaves_no_partial_request(way):
    scheduler, memory = make()
    first, second = jobs((4, 2), (4, 2))
    add(scheduler, first, second)
    run(scheduler, memory, scheduler.step(0))
    release = memory.release

    def broken(job) -> None:
        release(job)
        raise RuntimeError("broken")

    memory.release = broken
    with pytest.raises(RuntimeError, match="broken"):
        scheduler.preempt(first, Step()) if way == "preempt" else getattr(scheduler, way)(first)
    memory.release = release
    assert scheduler.waiting == ([] if way == "remove" else [first])
    scheduler.remove(first)
    while scheduler.busy:
        run(scheduler, memory, scheduler.step(0))
    assert second.said == 2
    assert not memory.held
    again = jobs((4, 2))[0]
    add(scheduler, again)
    assert scheduler.waiting == [again]


class _FailsOnce(list):
    """A list that fails at one of its methods, once."""

    def __init__(self, method: str, error: BaseException, members: list) -> None:
        super().__init__(members)
        self.method: str | None = method
        self.error = error

    def _check(self, method: str) -> None:
        if self.method == method:
            self.method = None
            raise self.error

    def insert(self, *at) -> None:
        self._check("insert")
        super().insert(*at)

    def __delitem__(self, at) -> None:
        self._check("delete")
        super().__delitem__(at)


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["insert", "delete"])
def test_fault_after_admission_undoes_it(method, error):
    """The fault occurs when the pool has made room, and the job does not run yet."""
    scheduler, memory = make()
    first, second = jobs((4, 2), (4, 2))
    add(scheduler, first, second)
    name = "running" if method == "insert" else "waiting"
    setattr(scheduler, name, _FailsOnce(method, error, getattr(scheduler, name)))
    if isinstance(error, Exception):
        step = scheduler.step(0)
        assert step.failed == [(first, error)]
        run(scheduler, memory, step)
    else:
        with pytest.raises(KeyboardInterrupt):
            scheduler.step(0)
        assert scheduler.waiting == [first, second]
        assert not memory.held
        assert not scheduler.running
    while scheduler.busy:
        run(scheduler, memory, scheduler.step(0))
    assert first.said == (0 if isinstance(error, Exception) else 2)
    assert second.said == 2
    assert not memory.held


@pytest.mark.parametrize("answer", [Admission.COMING, Admission.FREEING])
def test_request_loading_from_a_lower_tier_waits_while_nothing_runs(answer):
    """Later requests of the same tenant run only after a request that lacks nothing but its segments."""
    scheduler, memory = make()
    first, second = FakeJob(1, 4, 1), FakeJob(2, 4, 1)
    say, answers = memory.admit, {first: answer}
    memory.admit = lambda job, alone: answers[job] if job in answers else say(job, alone)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.step(0.0)
    assert step.failed == []
    assert [job for job, _ in step.prefill] == ([second] if answer is Admission.COMING else [])
    answers.clear()
    assert first in [job for job, _ in scheduler.step(0.0).prefill]


def test_request_is_lone_beside_the_modules_that_it_waits_for_only():
    scheduler, _ = make()
    assert scheduler.lone
    scheduler.add(FakeJob(0, 4, 1))
    scheduler.add(FakeJob(1, 4, 0, sequences=0))
    assert scheduler.lone
    other = FakeJob(2, 4, 1)
    scheduler.add(other)
    assert not scheduler.lone
    scheduler.remove(other)
    assert scheduler.lone
