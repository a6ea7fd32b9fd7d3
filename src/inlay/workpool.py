"""Threads beside the engine: for request bodies, prompts, grammars and schemas, and for transfers between the tiers.

Each kind of work has a pool of its own, so slow work of one kind never delays another. Within a pool, owners take
turns. A running job cannot be interrupted, so it keeps its thread even if its caller has gone. A client that reconnects
gets no second thread.

A pass of the engine releases Python's lock in some hundred C calls. Each time it then waits until the other thread
leaves a C call of its own, such as one over a text of 8 MB. So threads that parse, tokenize or compile for one client
can slow every pass many times over. While the engine is busy, an owner rests after long work (see ``Pacer``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from inlay.errors import DeadlineError, EngineDeadError, InlayError, QueueFullError

T = TypeVar("T")

logger = logging.getLogger(__name__)

SHARE = 0.25  # of the engine's time that background work may take
SHORT_S = 0.002  # processor time too short for a rest
LONGEST_S = 2.0  # of one rest


def never_busy() -> bool:
    return False


class Pacer:
    """Computes the rests of background work. ``busy`` returns True if the engine has work; thread-safe."""

    def __init__(self, busy: Callable[[], bool] = never_busy) -> None:
        self._busy = busy

    @property
    def busy(self) -> bool:
        """True if background work delays the engine."""
        return self._busy()

    def rest_s(self, worked_s: float, owners: int = 1) -> float:
        """Seconds to rest after ``worked_s`` seconds of processor time, which ``owners`` owners share."""
        if worked_s < SHORT_S or not self.busy:
            return 0.0
        return min(worked_s * (owners / SHARE - 1), LONGEST_S)


class ThisProcess:
    """The process that an object with threads was made in.

    A forked child has the objects of its parent and none of its threads. To wait for one of these would hang.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def left(self) -> bool:
        """True in a process that was forked from that one."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise EngineDeadError in a forked process."""
        if self.left:
            raise EngineDeadError(
                f"this engine was made in process {self._pid}, and process {os.getpid()} is a fork of that without its "
                "threads; make the LLM in the process that uses it, or start processes with the method 'spawn'"
            )


_THREADS = 4  # per kind; they share the interpreter's lock, so more would not be faster
_LOOK_S = 0.05  # seconds between checks whether the engine is still busy


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
        future, function, args = self.future, self.function, self.args
        self.function, self.args = _nothing, ()  # its data goes with the call, whatever still refers to the job
        try:
            result = function(*args)
        except BaseException as error:
            del function, args, self
            future.set_exception(error)
            del future  # breaks the cycle of error, traceback and future
        else:
            del function, args
            future.set_result(result)


class WorkPool:
    """Daemon threads with a queue per owner. Owners take turns, and each has at most half of the threads.

    Threads start on demand. The process may exit before they finish.

    Args:
        name: the name of the threads, and of the work in error messages.
        threads: the most threads.
        most_waiting: the most queued jobs of one owner; None for no limit.
        pacer: sets the rests of an owner after work; None for no rests.
        clock: returns seconds.
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
        self._lines: dict[str | None, dict[Future[Any], _Job[Any]]] = {}  # in the order of their turns
        self._running: Counter[str | None] = Counter()
        self._started: list[threading.Thread] = []
        self._idle = 0
        self._begun_at = clock()  # when a job last began
        self._closed = False
        self._process = ThisProcess()

    def submit(self, function: Callable[..., T], *args: Any, owner: str | None = None) -> Future[T]:
        """Call a function on one of the threads. Cancelling the future removes it from the queue.

        Args:
            owner: the tenant that the work counts for; None for work that may take all threads.

        Raises:
            QueueFullError: if the owner's queue is full.
            InlayError: if the pool is closed, or if this process was forked from its own.
        """
        self._process.check()
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise _closed()
            line = self._lines.setdefault(owner, {})
            if self._most_waiting is not None and len(line) >= self._most_waiting:
                raise QueueFullError(
                    f"{len(line)} requests wait for {self._name} already, which is the limit; send the request "
                    "again later"
                )
            job = _Job(function, args, owner, future, self._clock())
            line[future] = job
            if sum(map(len, self._lines.values())) > self._idle and len(self._started) < self._threads:
                thread = threading.Thread(target=self._work, name=f"inlay-{self._name}", daemon=True)
                thread.start()
                self._started.append(thread)
            self._wake.notify()
        future.add_done_callback(partial(self._withdraw, owner))
        return future

    def post(self, job: Callable[[], object]) -> None:
        """Call a function whose result is not needed. A failure is logged. Does nothing after ``close``."""
        with suppress(InlayError):
            self.submit(job).add_done_callback(self._log)

    async def run(
        self, function: Callable[..., T], *args: Any, owner: str | None = None, deadline: float | None = None
    ) -> T:
        """Call a function on one of the threads and await its result.

        A cancelled or late caller stops waiting, but a running job continues to its end.

        Args:
            deadline: on the clock of ``time.perf_counter``.

        Raises:
            DeadlineError: if the deadline passes first. Errors of the function are passed on.
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
        """The owners that rest after their last work."""
        with self._wake:
            now = self._clock()
            return {owner for owner, until in self._rests.items() if until > now}

    @property
    def stuck_s(self) -> float:
        """How many seconds a job has been queued while all threads are busy and no job has started."""
        with self._wake:
            waiting = [next(iter(line.values())).since for line in self._lines.values() if line]
            if not waiting or sum(self._running.values()) < self._threads:
                return 0.0
            return self._clock() - max(self._begun_at, min(waiting))

    def close(self, timeout: float = 0.0) -> bool:
        """Refuse further work, and fail queued jobs. The results of running jobs are dropped.

        Args:
            timeout: the seconds to wait for running jobs.

        Returns:
            True if all threads have ended in this time.
        """
        if self._process.left:  # a thread of the parent process may hold the lock
            return True
        with self._wake:
            self._closed = True
            waiting = [job for line in self._lines.values() for job in line.values()]
            self._lines.clear()
            self._wake.notify_all()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_closed())
        until = time.monotonic() + timeout
        others = [thread for thread in self._started if thread is not threading.current_thread()]
        for thread in others if timeout else ():
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _log(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not self._closed:
            logger.error("a job of %s failed", self._name, exc_info=error)

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
            del job  # frees the job's data while this thread is idle

    def _rest(self, owner: str | None, worked_s: float) -> None:
        if owner is None:  # all work without an owner would rest together
            return
        now = self._clock()
        self._rests = {one: until for one, until in self._rests.items() if until > now}
        if rest_s := self._pacer.rest_s(worked_s, owners=len({*self._lines, *self._rests, owner})):
            self._rests[owner] = min(self._rests.get(owner, now) + rest_s, now + LONGEST_S)

    def _next(self) -> _Job[Any] | None:
        """Return the next job, once there is one; None once the pool is closed."""
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
    """One pool for each kind of work. most_waiting: the most queued prompts, grammars or schemas of one owner."""

    def __init__(self, most_waiting: int | None = None, pacer: Pacer | None = None) -> None:
        self.prompts = WorkPool("prompt processing", most_waiting=most_waiting, pacer=pacer)
        self.grammars = WorkPool("compiling grammars", most_waiting=most_waiting, pacer=pacer)
        self.schemas = WorkPool("laying out schemas", most_waiting=most_waiting, pacer=pacer)

    def close(self) -> None:
        for pool in (self.prompts, self.grammars, self.schemas):
            pool.close()


def _nothing(*_: Any) -> Any:
    """The function of a job that was called."""


def _closed() -> InlayError:
    return InlayError("the engine has been shut down; make a new LLM", code="engine.shut_down")
