"""Threads for what comes before the engine: tokenizing and laying out prompts, compiling grammars, reading schemas.

Each kind has threads of its own, so that slow work of one kind never holds up another, and within a kind tenants take
turns. While the engine is busy, an owner's next work waits for a while behind what took long (engine/pacing.py).
Nothing that has begun can be ended from outside, so it keeps its thread until it ends, whether or not somebody still
waits for it: a client that hangs up and comes again gets no second thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from inlay.engine.background.pacing import LONGEST_S, Pacer
from inlay.engine.forks import ThisProcess
from inlay.errors import DeadlineError, InlayError, QueueFullError

T = TypeVar("T")

_THREADS = 4  # of each kind; they wait for each other's turn in the interpreter, so that more would not be faster
_LOOK_S = 0.05  # how often those that rest look whether the engine is still busy


@dataclass(eq=False, slots=True)
class _Job(Generic[T]):
    function: Callable[..., T]
    args: tuple[Any, ...]
    owner: str | None
    future: Future[T]
    since: float

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(*self.args))
        except BaseException as error:
            self.future.set_exception(error)
            del self  # the error's traceback leads here, and the future to the error: a circle


class WorkPool:
    """Daemon threads with a line for each owner: these take turns, and none has more than half of the threads.

    Threads begin when they are needed. A process that ends does not wait for what they do.

    name: of the threads, and what work is called in errors.
    threads: how many at most.
    most_waiting: how many jobs of one owner may wait; None for no bound.
    pacer: how long an owner rests; None for not at all.
    clock: in seconds.
    """

    def __init__(
        self,
        name: str,
        threads: int = _THREADS,
        *,
        most_waiting: int | None = None,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._threads = threads
        self._most_waiting = most_waiting
        self._pacer = pacer or Pacer()
        self._rests: dict[str | None, float] = {}  # until when
        self._clock = clock
        self._wake = threading.Condition()
        self._lines: dict[str | None, dict[Future[Any], _Job[Any]]] = {}  # in the order of whose turn it is
        self._running: Counter[str | None] = Counter()
        self._started = 0
        self._idle = 0
        self._begun_at = clock()  # when a job last began
        self._closed = False
        self._process = ThisProcess()

    def submit(self, function: Callable[..., T], *args: Any, owner: str | None = None) -> Future[T]:
        """Have a function called on one of the threads; cancelling the future takes it out of the line.

        owner: whose work it is, who shares; None for work without an owner, which may take all threads.
        Raises QueueFullError where the owner has too much in line, and InlayError once the pool is closed, or in a
        process that was forked from its own.
        """
        self._process.check()
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise _closed()
            line = self._lines.setdefault(owner, {})
            if self._most_waiting is not None and len(line) >= self._most_waiting:
                raise QueueFullError(f"{len(line)} requests are in line for {self._name} already, as many as may be")
            job = _Job(function, args, owner, future, self._clock())
            line[future] = job
            if sum(map(len, self._lines.values())) > self._idle and self._started < self._threads:
                self._started += 1
                threading.Thread(target=self._work, name=f"inlay-{self._name}", daemon=True).start()
            self._wake.notify()
        future.add_done_callback(partial(self._withdraw, owner))
        return future

    async def run(
        self, function: Callable[..., T], *args: Any, owner: str | None = None, deadline: float | None = None
    ) -> T:
        """The same for an event loop, which waits for the result.

        Who is cancelled, or reaches the deadline, waits no longer; work that has begun goes on to its end.

        deadline: on the clock of ``time.perf_counter``. Raises DeadlineError, and what the function raises.
        """
        left = None if deadline is None else deadline - time.perf_counter()
        late = DeadlineError(
            f"the request was still in {self._name} and its deadline has passed; send less, or give it more time"
        )
        if left is not None and left <= 0:
            raise late
        try:
            async with asyncio.timeout(left) as timeout:
                return await asyncio.wrap_future(self.submit(function, *args, owner=owner))
        except TimeoutError:
            if timeout.expired():
                raise late from None
            raise

    @property
    def resting(self) -> set[str | None]:
        """The owners whose next work waits for a while, because of what their last one took."""
        with self._wake:
            now = self._clock()
            return {owner for owner, until in self._rests.items() if until > now}

    @property
    def stuck_s(self) -> float:
        """For how many seconds somebody has been waiting while all threads are busy and no work has begun."""
        with self._wake:
            waiting = [next(iter(line.values())).since for line in self._lines.values() if line]
            if not waiting or sum(self._running.values()) < self._threads:
                return 0.0
            return self._clock() - max(self._begun_at, min(waiting))

    def close(self) -> None:
        """Refuse further work, and fail what is in line; what has begun goes on for nobody."""
        if self._process.left:  # a thread that is not here may have the lock
            return
        with self._wake:
            self._closed = True
            waiting = [job for line in self._lines.values() for job in line.values()]
            self._lines.clear()
            self._wake.notify_all()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_closed())

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began = time.thread_time()
            job.run()
            worked_s = time.thread_time() - began
            with self._wake:
                self._running[job.owner] -= 1
                if not self._running[job.owner]:
                    del self._running[job.owner]
                self._rest(job.owner, worked_s)
            del job  # while the thread waits for the next one, nobody keeps what this one held

    def _rest(self, owner: str | None, worked_s: float) -> None:
        if owner is None:  # whoever has no owner would wait for all others who have none
            return
        now = self._clock()
        self._rests = {one: until for one, until in self._rests.items() if until > now}
        if rest_s := self._pacer.rest_s(worked_s, owners=len({*self._lines, *self._rests, owner})):
            self._rests[owner] = min(self._rests.get(owner, now) + rest_s, now + LONGEST_S)

    def _next(self) -> _Job[Any] | None:
        """The job whose turn it is, as soon as there is one; None once the pool is closed."""
        with self._wake:
            while not self._closed:
                for owner in self._lines:
                    if self._may_begin(owner):
                        return self._take(owner)
                self._idle += 1
                self._wake.wait(_LOOK_S if self._rests and any(self._lines.values()) else None)
                self._idle -= 1
        return None

    def _may_begin(self, owner: str | None) -> bool:
        if owner in self._rests:
            if self._clock() < self._rests[owner] and self._pacer.busy:
                return False
            del self._rests[owner]
        share = self._threads if owner is None else max(1, self._threads // 2)
        return bool(self._lines.get(owner)) and self._running[owner] < share

    def _take(self, owner: str | None) -> _Job[Any]:
        line = self._lines.pop(owner)
        job = line.pop(next(iter(line)))
        if line:
            self._lines[owner] = line  # behind the others
        self._running[owner] += 1
        self._begun_at = self._clock()
        return job

    def _withdraw(self, owner: str | None, future: Future[Any]) -> None:
        if not future.cancelled():
            return
        with self._wake:
            line = self._lines.get(owner, {})
            line.pop(future, None)
            if not line:
                self._lines.pop(owner, None)


class WorkPools:
    """One for each kind of work. most_waiting: how many prompts, grammars or schemas of one owner may wait."""

    def __init__(self, most_waiting: int | None = None, pacer: Pacer | None = None) -> None:
        self.prompts = WorkPool("prompt processing", most_waiting=most_waiting, pacer=pacer)
        self.grammars = WorkPool("compiling grammars", most_waiting=most_waiting, pacer=pacer)
        self.schemas = WorkPool("laying out schemas", most_waiting=most_waiting, pacer=pacer)

    def close(self) -> None:
        for pool in (self.prompts, self.grammars, self.schemas):
            pool.close()


def _closed() -> InlayError:
    return InlayError("the engine has been shut down; make a new LLM", code="engine.shut_down")
