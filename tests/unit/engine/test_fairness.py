"""Fair shares of passes, slots and the queue, for new requests beside long prompts and for tenants, under any load."""

from __future__ import annotations

import math
from collections import Counter
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.scheduler import Scheduler, crowded_out
from inlay.errors import QueueFullError
from tests.generated import examples
from tests.raising import raises
from tests.unit.engine.fakes import FakeJob, FakeMemory, make, run


def first_tokens(scheduler, memory, arriving: dict[int, list[FakeJob]], passes: int) -> dict[FakeJob, int]:
    """The pass at whose end each job has its first token, counted from that before which it arrived."""
    first: dict[FakeJob, int] = {}
    jobs: list[FakeJob] = []
    for now in range(passes):
        for job in arriving.get(now, ()):
            job.arrival = now
            scheduler.add(job)
            jobs.append(job)
        run(scheduler, memory, scheduler.step(now))
        for job in jobs:
            if job.said and job not in first:
                first[job] = now + 1 - int(job.arrival)
    return first


def big(places: int = 64, waiting: int | None = None):
    return make(chunks=10**9, requests=places, tokens=64, prefill=64, waiting=waiting)


@pytest.mark.parametrize("longs", [1, 3, 20])
def test_new_request_waits_at_most_two_passes(longs):
    """After prompts of 30 passes."""
    scheduler, memory = big()
    arriving = {0: [FakeJob(n, 1920, 4) for n in range(longs)]}
    arriving |= {now: [FakeJob(100 + now, 10 + 7 * now % 90, 4)] for now in range(1, 25, 4)}
    first = first_tokens(scheduler, memory, arriving, 700)
    for job, passes in first.items():
        if job.number >= 100:
            assert passes <= math.ceil(job.prompt / 64) + 2, job
    assert len(first) == longs + 6, "and everybody has one in the end"


def test_first_prompt_advances_despite_new_requests():
    scheduler, memory = big()
    long = FakeJob(0, 1920, 1)
    arriving = {0: [long]} | {now: [FakeJob(now * 10 + n, 60, 1) for n in range(3)] for now in range(1, 150)}
    assert first_tokens(scheduler, memory, arriving, 150)[long] <= 4 * 30


def test_urgent_request_precedes_an_earlier_one():
    scheduler, memory = big()
    slow, urgent = FakeJob(0, 640, 1, priority=1), FakeJob(1, 640, 1, priority=-1)
    first = first_tokens(scheduler, memory, {0: [slow], 1: [urgent]}, 30)
    assert first[urgent] <= 16 < first[slow]


def test_less_urgent_requests_get_a_share():
    scheduler, memory = big()
    arriving = {0: [FakeJob(0, 1920, 4, priority=-1)], 1: [FakeJob(1, 28, 4)], 2: [FakeJob(2, 28, 4, priority=1)]}
    first = first_tokens(scheduler, memory, arriving, 60)
    assert [passes for job, passes in first.items() if job.number] == [2, 3]


@pytest.mark.parametrize(("weight", "share"), [(1.0, 1 / 2), (3.0, 3 / 4)])
def test_tenants_share_passes_by_weight(weight, share):
    """This holds for any number of prompts from one tenant, and for any first tenant."""
    scheduler, memory = big()
    many = [FakeJob(n, 1000, 1, tenant="many") for n in range(30)]
    one = [FakeJob(100 + n, 1000, 1, tenant="one", weight=weight) for n in range(4)]
    for job in [*many, *one]:
        scheduler.add(job)
    computed: Counter[str] = Counter()
    for now in range(30):
        step = scheduler.step(now)
        for job, tokens in step.prefill:
            computed[job.tenant] += tokens
        run(scheduler, memory, step)
    assert computed.total() == 30 * 64
    assert computed["one"] / computed.total() == pytest.approx(share, abs=0.05)


def test_many_tenants_alternate():
    scheduler, memory = big()
    for n in range(40):
        scheduler.add(FakeJob(n, 500, 1, tenant=f"tenant {n}"))
    computed: Counter[str] = Counter()
    for now in range(100):
        step = scheduler.step(now)
        for job, tokens in step.prefill:
            computed[job.tenant] += tokens
        run(scheduler, memory, step)
    assert max(computed.values()) - min(computed.values()) <= 32


def test_absent_tenant_saves_up_no_claim():
    scheduler, memory = big()
    scheduler.add(FakeJob(0, 6400, 1, tenant="here"))
    for now in range(50):
        run(scheduler, memory, scheduler.step(now))
    scheduler.add(FakeJob(1, 6400, 1, tenant="new"))
    computed: Counter[str] = Counter()
    for now in range(50, 60):
        step = scheduler.step(now)
        for job, tokens in step.prefill:
            computed[job.tenant] += tokens
        run(scheduler, memory, step)
    assert computed["here"] == computed["new"] == 320


def test_tenant_with_all_slots_gives_some_up():
    scheduler, memory = big(places=8)
    many = [FakeJob(n, 30, 10**6, tenant="many") for n in range(20)]
    for job in many:
        scheduler.add(job)
    for now in range(10):
        run(scheduler, memory, scheduler.step(now))
    arriving = {n: [FakeJob(100 + n, 20, 10**6, tenant="other")] for n in range(8)}
    first = first_tokens(scheduler, memory, arriving, 40)
    assert Counter(job.tenant for job in scheduler.running) == {"many": 4, "other": 4}
    assert [first[job] <= 3 for jobs in list(arriving.values())[:4] for job in jobs] == [True] * 4
    preempted = [job for job in many if job in scheduler.waiting]
    assert many[:4] == [job for job in many if job in scheduler.running], "the last in line went"
    assert len(preempted) == 16


def test_tenant_cannot_fill_the_queue_for_others():
    scheduler, memory = big(places=1, waiting=10)
    many = [FakeJob(n, 30, 10**6, tenant="many") for n in range(11)]
    for job in many[:1]:
        scheduler.add(job)
        run(scheduler, memory, scheduler.step(0))
    for job in many[1:]:
        scheduler.add(job)
    with raises("engine.queue_full", QueueFullError, names="10"):
        scheduler.add(FakeJob(50, 30, 1, tenant="many"))
    others = [FakeJob(100 + n, 30, 1, tenant="other") for n in range(6)]
    for job in others[:5]:
        scheduler.add(job)
    with raises("engine.queue_full", QueueFullError, names="10"):
        scheduler.add(others[5])
    assert Counter(job.tenant for job in scheduler.waiting) == {"many": 5, "other": 5}
    failed = scheduler.step(1).failed
    assert [job for job, _ in failed] == many[:5:-1], "the last in line went"
    assert {str(error) for _, error in failed} == {
        "the queue is full, and other tenants need their share of it; send the request again later"
    }
    assert not scheduler.step(2).failed


def test_displaced_request_fails_even_without_other_requests():
    scheduler, _ = big(places=1, waiting=2)
    for n in range(2):
        scheduler.add(FakeJob(n, 30, 1, tenant="many"))
    other = FakeJob(2, 30, 1, tenant="other")
    scheduler.add(other)
    for job in list(scheduler.waiting):
        scheduler.remove(job)
    assert scheduler.busy
    assert [job.number for job, _ in scheduler.step(0).failed] == [1]
    assert not scheduler.busy


def test_started_request_is_not_displaced():
    scheduler, memory = make(chunks=20, requests=4, tokens=64, waiting=1)
    first, second = FakeJob(0, 6, 12, tenant="a"), FakeJob(1, 6, 12, tenant="a")
    scheduler.add(first)
    run(scheduler, memory, scheduler.step(0))
    scheduler.add(second)
    while second not in scheduler.waiting or not second.said:
        run(scheduler, memory, scheduler.step(0))
    with pytest.raises(QueueFullError):
        scheduler.add(FakeJob(2, 1, 1, tenant="b"))
    assert scheduler.waiting == [second]


def test_prompt_tokens_of_a_step_can_be_limited():
    scheduler, _ = big()
    scheduler.add(FakeJob(0, 100, 1))
    assert [tokens for _, tokens in scheduler.step(0, 5).prefill] == [5]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 9), st.sampled_from([0.5, 1.0, 2.0]))),
    st.sampled_from("abcd"),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_slots_move_until_fair_and_never_back(counts, tenant, weight):
    counts = {name: entry for name, entry in counts.items() if entry[0]}
    for _ in range(50):
        loser = crowded_out(counts, tenant, weight)
        if loser is None:
            break
        counts[loser] = (counts[loser][0] - 1, counts[loser][1])
        counts[tenant] = (counts.get(tenant, (0, weight))[0] + 1, weight)
        assert crowded_out(counts, loser, counts[loser][1]) != tenant
    else:
        pytest.fail("places move for ever")


def test_long_queue_takes_linear_time():
    """A generous bound: 20,000 took 9 s when every arrival went through the queue."""
    scheduler, _ = make(chunks=10**9, requests=1)
    jobs = [FakeJob(n, 1, 1, priority=n % 7) for n in range(20_000)]
    began = thread_time()
    for job in jobs:
        scheduler.add(job)
    for job in jobs[::-1]:
        scheduler.remove(job)
    assert thread_time() - began < 3
    assert not scheduler.waiting


@settings(deadline=None, max_examples=examples(50))
@given(st.randoms(use_true_random=False))
def test_every_request_of_any_tenant_ends_and_counts_balance(randomly):
    memory = FakeMemory(40)
    scheduler: Scheduler[FakeJob] = Scheduler(4, 16, 8, 12, memory)
    alive: set[FakeJob] = set()
    for number in range(80):
        job = FakeJob(
            number,
            randomly.randrange(1, 30),
            randomly.randrange(1, 9),
            randomly.choice([0, 0, 1]),
            number,
            tenant=randomly.choice("abc"),
            weight=randomly.choice([1.0, 2.0]),
            sequences=randomly.choice([1, 1, 0]),
        )
        job.answer = max(job.answer, 1)
        try:
            scheduler.add(job)
            alive.add(job)
        except QueueFullError:
            assert len(scheduler.waiting) >= 12  # preempted requests are in the queue too
        for _ in range(randomly.randrange(3)):
            alive -= {job for job, _ in one(scheduler, memory, number).failed}
        alive = {job for job in alive if job.said < job.answer}
        assert set(scheduler.running) | set(scheduler.waiting) <= alive
    for _ in range(3000):
        if not scheduler.busy:
            break
        alive -= {job for job, _ in one(scheduler, memory, 99).failed}
    assert not scheduler.busy
    assert not memory.held
    assert all(job.said == job.answer for job in alive)


def one(scheduler, memory, now):
    step = scheduler.step(now)
    assert sum(tokens for _, tokens in step.prefill) + len(step.decode) <= 16
    assert sum(job.sequences for job in scheduler.running) <= 4
    ran = [*step.decode, *(job for job, _ in step.prefill)]
    assert set(ran) <= set(scheduler.running)
    run(scheduler, memory, step)
    return step
