"""Threads shared by owners: order, waiting, and the end of work that no caller waits for any more."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial

import pytest

from inlay.errors import DeadlineError, InlayError, QueueFullError
from inlay.workpool import WorkPool
from tests.raising import raises

LONG_S = 20.0


class Gates:
    """Work that blocks until it is released, and records the order in which it started."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.news = threading.Condition()
        self.open: set[str] = set()

    def work(self, name: str) -> str:
        with self.news:
            self.begun.append(name)
            self.news.notify_all()
            assert self.news.wait_for(lambda: name in self.open or "all" in self.open, LONG_S)
        return name

    def let_go(self, name: str) -> None:
        with self.news:
            self.open.add(name)
            self.news.notify_all()

    def wait_for(self, *names: str) -> None:
        with self.news:
            assert self.news.wait_for(lambda: set(names) <= set(self.begun), LONG_S), self.begun


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.let_go("all")


def test_results_and_errors_are_returned():
    pool = WorkPool("sums")
    assert pool.submit(sum, [1, 2]).result(LONG_S) == 3
    assert isinstance(pool.submit(int, "x").exception(LONG_S), ValueError)
    assert asyncio.run(pool.run(sum, [1, 2], owner="ann", deadline=time.perf_counter() + LONG_S)) == 3
    pool.close()


def test_an_owner_has_half_of_the_threads_at_most(gates):
    pool = WorkPool("work", 4)
    names = [f"mallory{n}" for n in range(6)]
    futures = [pool.submit(gates.work, name, owner="mallory") for name in names]
    bob = pool.submit(gates.work, "bob", owner="bob")
    gates.wait_for("mallory0", "mallory1", "bob")
    assert gates.begun.count("bob") == 1
    assert set(gates.begun) == {"mallory0", "mallory1", "bob"}
    gates.let_go("mallory0")
    gates.wait_for("mallory2")
    gates.let_go("all")
    assert [future.result(LONG_S) for future in [*futures, bob]] == [*names, "bob"]


def test_owners_alternate(gates):
    pool = WorkPool("work", 1)
    futures = [pool.submit(gates.work, "first", owner="ann")]
    gates.wait_for("first")
    for owner in ("ann", "bob", "eve"):
        futures += [pool.submit(gates.work, f"{owner}{n}", owner=owner) for n in range(2)]
    gates.let_go("all")
    for future in futures:
        future.result(LONG_S)
    assert gates.begun == ["first", "ann0", "bob0", "eve0", "ann1", "bob1", "eve1"]


def test_unowned_work_may_use_all_threads(gates):
    pool = WorkPool("work", 3)
    for number in range(4):
        pool.submit(gates.work, str(number))
    gates.wait_for("0", "1", "2")
    assert len(gates.begun) == 3


def test_queue_length_is_bounded(gates):
    pool = WorkPool("compiling", 2, most_waiting=2)
    futures = [pool.submit(gates.work, "0", owner="ann")]
    gates.wait_for("0")
    futures += [pool.submit(gates.work, str(n), owner="ann") for n in (1, 2)]
    with raises("engine.queue_full", QueueFullError, names="2"):
        pool.submit(gates.work, "3", owner="ann")
    pool.submit(gates.work, "bob", owner="bob")
    gates.wait_for("bob")
    assert futures[1].cancel()
    pool.submit(gates.work, "3", owner="ann")


def test_cancelled_waiting_job_never_starts_and_running_job_continues(gates):
    pool = WorkPool("work", 2)  # of which one owner may have one

    async def leave() -> None:
        running = asyncio.create_task(pool.run(gates.work, "running", owner="eve"))
        await asyncio.to_thread(gates.wait_for, "running")
        waiting = asyncio.create_task(pool.run(gates.work, "waiting", owner="eve"))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        again = pool.submit(gates.work, "again", owner="eve")
        await pool.run(sum, [], owner="bob")  # goes by
        assert gates.begun == ["running"]
        gates.let_go("all")
        assert await asyncio.wrap_future(again) == "again"

    asyncio.run(leave())
    assert gates.begun == ["running", "again"]


@pytest.mark.parametrize("begun", [True, False])
def test_deadline_error_is_raised_at_once(gates, begun):
    pool = WorkPool("prompt processing", 2)

    async def ask() -> None:
        if not begun:
            pool.submit(gates.work, "before", owner="ann")
            await asyncio.to_thread(gates.wait_for, "before")
        sentence = "the request was still in prompt processing and its deadline has passed; send less"
        with pytest.raises(DeadlineError, match=sentence):
            await pool.run(gates.work, "late", owner="ann", deadline=time.perf_counter() + 0.01)

    asyncio.run(ask())


def test_expired_deadline_starts_nothing():
    pool, called = WorkPool("work"), []
    with pytest.raises(DeadlineError):
        asyncio.run(pool.run(called.append, 1, deadline=time.perf_counter() - 1))
    assert pool.submit(list).result(LONG_S) == []
    assert not called


def test_timeout_error_of_the_work_is_raised_unchanged():
    def fails() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        asyncio.run(WorkPool("work").run(fails, deadline=time.perf_counter() + LONG_S))


def test_stuck_time_is_reported(gates):
    now = [100.0]
    pool = WorkPool("work", 2, clock=lambda: now[0])
    for name in ("0", "1"):
        pool.submit(gates.work, name)
    gates.wait_for("0", "1")
    now[0] = 130.0
    assert pool.stuck_s == 0, "nobody waits"
    last = pool.submit(gates.work, "2")
    now[0] = 137.0
    assert pool.stuck_s == 7
    gates.let_go("0")
    gates.wait_for("2")
    assert pool.stuck_s == 0
    gates.let_go("all")
    last.result(LONG_S)


def test_closed_pool_fails_waiting_work_and_takes_no_more(gates):
    pool = WorkPool("work", 2)
    running = pool.submit(gates.work, "running", owner="ann")
    gates.wait_for("running")
    waiting = pool.submit(gates.work, "waiting", owner="ann")
    pool.close()
    assert isinstance(waiting.exception(LONG_S), InlayError)
    with raises("engine.shut_down"):
        pool.submit(sum, [])
    gates.let_go("all")
    assert running.result(LONG_S) == "running"


def test_many_jobs_of_many_owners_each_run_once():
    pool, done = WorkPool("work", 4), []
    futures: list[Future[None]] = [
        pool.submit(partial(done.append, n), owner=(None, "a", "b", "c")[n % 4]) for n in range(400)
    ]
    cancelled = {n for n in range(0, 400, 7) if futures[n].cancel()}
    for n, future in enumerate(futures):
        if n in cancelled:
            with pytest.raises(CancelledError):
                future.result(LONG_S)
        else:
            future.result(LONG_S)
    assert sorted(done) == sorted(set(range(400)) - cancelled)


def test_exiting_process_does_not_wait_for_threads():
    program = (
        "import time\nfrom inlay.workpool import WorkPool\nbegun = []\n"
        "pool = WorkPool('work')\npool.submit(lambda: (begun.append(1), time.sleep(600)))\n"
        "while not begun: time.sleep(0.01)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("fails", [False, True])
def test_finished_work_is_freed_at_once(fails: bool):
    class Text(str):
        """One that says when it is gone."""

    def work(text: Text) -> Text:
        if fails:
            raise ValueError("a fault")
        return text

    async def done() -> None:
        pool = WorkPool("reading")
        text = Text("long")
        gone = weakref.ref(text)
        with suppress(ValueError):
            await pool.run(work, text)
        del text
        while gone() is not None and time.monotonic() < until:  # the thread releases it after its result
            await asyncio.sleep(0.001)
        assert gone() is None
        pool.close()

    until = time.monotonic() + 1
    gc.disable()
    try:
        asyncio.run(done())
    finally:
        gc.enable()
