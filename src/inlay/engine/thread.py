"""Runs the steps of an engine, on a thread of its own or on callers' threads. Steps never overlap.

OpenMP keeps a set of threads for every computing thread. If these outnumber the cores, OpenMP lets them sleep between
two pieces of work, which makes a decode step much longer. So LLM computes on the caller's thread. AsyncLLM must not
block its event loop, and computes on one dedicated thread.

Only the holder of the engine lock may touch the engine, and never in the middle of a step. Other code posts commands.
This holds on the stepping thread too, because the garbage collector may end an abandoned generator at any line.
Commands run

- before the next step, on a dedicated thread;
- at once on callers' threads if the lock is free, else by its holder after the step.

Posting never blocks, so finalizers may post. ``run`` and ``pump`` wait for the lock. Inside a step they raise an error
instead of a deadlock. Ctrl-C waits for the end of a step or of commands.

An engine ends once: by ``stop``, or by a permanent fault. Running requests then receive the error, posted commands run
or fail, and later calls are refused with the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from inlay.engine.core import Command, EngineCore, Inbox, fault_of
from inlay.engine.encoder import Task
from inlay.engine.interrupts import HeldInterrupts
from inlay.engine.request import Request
from inlay.errors import AbortedError, EngineDeadError, InlayError, ParameterError
from inlay.wording import fault_in_words
from inlay.workpool import ThisProcess

logger = logging.getLogger(__name__)
#: Called on the stepping thread with the new events of a request, at most once a step. It must be quick and must not
#: raise.
Listener = Callable[[Any], None]


class Listeners:
    """The running requests by id, each with its listener. Call with the engine lock held; see thread.py.

    Args:
        interruptible: raise Ctrl-C and the like on a caller's thread again.
    """

    def __init__(self, engine: EngineCore, *, interruptible: bool) -> None:
        self._engine = engine
        self._interruptible = interruptible
        self._known: dict[str, tuple[Task, Listener]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, request: Task, listener: Listener) -> None:
        """Queue a request. Raises ParameterError if its id is in use."""
        if request.id in self._known:
            raise ParameterError(
                f"request_id '{request.id}' is taken by a request that is under way; give another one",
                code="request.duplicate_id",
            )
        self._known[request.id] = request, listener
        self._engine.add(request)

    def refuse(self, request: Task, listener: Listener, error: Exception) -> None:
        """Fail a request that could not be queued, and report it."""
        self._fail(request, error)
        self._deliver(request, listener)

    def drop(self, request_id: str) -> None:
        """Remove a request in any state, without an event."""
        request, _ = self._known.pop(request_id, (None, None))
        if request is not None:
            for member in request.family:
                if not member.finished:
                    self._release(member)

    def finish(self, request_id: str, index: int) -> None:
        """End one answer that is complete, without an event."""
        request, _ = self._known.get(request_id, (None, None))
        if not isinstance(request, Request):
            return
        member = request.family[index]
        if not member.finished:
            member.finish()
            self._release(member)
        if request.answered:
            self._forget(request)

    def abort(self, request_id: str, error: Exception) -> None:
        """End a request with an error, and report it."""
        request, _ = self._known.get(request_id, (None, None))
        if request is not None:
            self._end(request, error)

    def _end(self, request: Task, error: Exception) -> None:
        self._fail(request, error)
        self.tell(request)

    def _fail(self, request: Task, error: Exception) -> None:
        for member in request.family:
            if not member.finished:
                member.error = error  # set first, so that the store keeps nothing from a failed step
                self._release(member)

    def _release(self, member: Task) -> None:
        try:
            self._engine.release(member)
        except Exception:  # the waiting caller still gets the end event
            logger.exception("request %s could not be taken out of the engine", member.id)

    def _listener_of(self, request: Task) -> Listener | None:
        """The request's listener; None if the request was dropped, even if its id is in use again."""
        named, listener = self._known.get(request.id, (None, None))
        return listener if named is request else None

    def _forget(self, request: Task) -> None:
        if self._listener_of(request) is not None:
            del self._known[request.id]

    def tell(self, request: Task) -> None:
        """Report the new events of a request, if it has a listener."""
        listener = self._listener_of(request)
        if listener is not None:
            self._deliver(request, listener)

    def _deliver(self, request: Task, listener: Listener) -> None:
        try:
            self._hand_over(request, listener)
        except BaseException as error:
            if self._interrupts(error):  # the listener may have received some events
                self._lose(request, AbortedError(f"request {request.id}: its pass was interrupted"))
                raise
            logger.exception("there is no telling of request %s; it ends", request.id)
            self._lose(request, fault_of(error))
            with suppress(Exception):  # the listener's event loop may be closed
                listener(request.failures())
        if request.answered:
            self._forget(request)

    def _hand_over(self, request: Task, listener: Listener) -> None:
        if events := request.events():
            listener(events)
            request.heard()

    def _lose(self, request: Task, error: Exception) -> None:
        """End a request whose listener has failed. All its answers fail, since some ends may be unreported."""
        self._fail(request, error)
        for member in request.family:
            member.error = error

    def tell_leader(self, member: Task) -> None:
        """Report an answer that left before the pass.

        A failure is ignored here and reported after the pass: other answers of the request may be in it and must not
        end now.
        """
        request = member.leader or member
        listener = self._listener_of(request)
        if listener is None:
            return
        try:
            self._hand_over(request, listener)
        except BaseException as error:
            if self._interrupts(error):
                raise
            return
        if request.answered:
            self._forget(request)

    def fail_all(self, error: Exception) -> None:
        """End all running requests with an error, and report it."""
        for request, _ in list(self._known.values()):
            self._end(request, error)

    def tell_ended(self) -> None:
        """Report the requests that have ended, after an interrupted step."""
        for request, _ in list(self._known.values()):
            if request.answered or request.failure is not None:
                self.tell(request)

    def _interrupts(self, error: BaseException) -> bool:
        """True for Ctrl-C and the like on a caller's thread, which must stop the caller."""
        return self._interruptible and not isinstance(error, Exception)


T = TypeVar("T")
_STALLED_S = 0.02  # between two checks while all requests wait for a lower tier
_INSIDE = "this is a call from inside a step of the engine (a finalizer, or a callback); make it when the step is over"


class EngineThread:
    """Steps an engine while it has work.

    Args:
        own: True for a dedicated thread, from the first request until ``stop``. Otherwise callers step it by ``pump``.
    """

    def __init__(self, engine: EngineCore, *, own: bool) -> None:
        self._engine = engine
        self._own = own
        self._inbox = Inbox(interruptible=not own)
        self._turn = threading.RLock()  # among callers' threads
        self._inside = False  # True while the lock's holder works, so that a call from inside a step is detected
        self._listeners = Listeners(engine, interruptible=not own)
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._process = ThisProcess()

    @property
    def listeners(self) -> int:
        """The number of running requests that have a listener."""
        return len(self._listeners)

    def submit(self, request: Task, listener: Listener) -> None:
        """Queue a request. If it cannot be queued, it ends at once with its error."""
        add = partial(self._listeners.add, request, listener)
        self._post(Command(add, partial(self._listeners.refuse, request, listener)))

    def finish(self, request_id: str, index: int) -> None:
        """End one answer that its listener has found complete. The listener receives no more events of it."""
        with suppress(InlayError):  # after the engine's end, the answer has ended too
            self._post(Command(lambda: self._listeners.finish(request_id, index), _nobody_waits))

    def cancel(self, request_id: str) -> None:
        """Cancel a request with all its answers, in any state. Its listener receives no more events."""
        with suppress(InlayError):
            self._post(Command(lambda: self._listeners.drop(request_id), _nobody_waits))

    def abort(self, request_id: str) -> None:
        """Cancel a request and send its listener an AbortedError."""
        error = AbortedError(f"request {request_id} was aborted")
        with suppress(InlayError):
            self._post(Command(lambda: self._listeners.abort(request_id, error), _nobody_waits))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function between two steps. Code inside a step must not wait for the result; see ``run``."""
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(function())

        def fail(error: Exception) -> None:
            with suppress(InvalidStateError):  # the caller has cancelled the future
                future.set_exception(error)

        self._post(Command(do, fail))
        return future

    def run(self, function: Callable[[], T]) -> T:
        """Call a function between two steps and return its result. Raises InlayError inside a step."""
        self._process.check()
        if not self._own:
            return self._at_work(function)
        if threading.current_thread() is self._thread:
            raise InlayError(_INSIDE, code="engine.inside")
        return self.call(function).result()

    def pump(self) -> bool:
        """Take one step, if the engine has no thread of its own. Raises InlayError inside a step.

        If all requests wait for a lower tier, wait for a moment without the lock.

        Returns:
            False if no request is under way.
        """
        self._at_work(self._step)
        if self._engine.stalled:
            self._engine.residency.wait(_STALLED_S)
        return len(self._listeners) > 0 or self._engine.busy

    def stop(self) -> None:
        """End the engine after its current step. Running requests end with an error. Does nothing in a forked
        process.
        """
        if self._process.left:
            return
        if not self._stopping:
            self._stopping = True
            self._inbox.refuse(_was_shut_down)
        with self._starting:
            thread = self._thread
        if self._own and thread is None:  # the thread never started
            self._shut_down()
            return
        self._inbox.put(Command(self._shut_down, _nobody_waits))
        if thread is None:
            # after the current step; inside a step, this thread holds the lock and serves the command afterwards
            with self._turn:
                pass
            self._serve()
        elif thread is not threading.current_thread():
            thread.join()

    def check_open(self) -> None:
        """Raise InlayError, with the reason, if the engine accepts no more work."""
        self._process.check()
        self._inbox.check_open()

    # Posting: on any thread, at any time

    def _post(self, command: Command) -> None:
        self.check_open()
        if self._own:
            self._start()
        self._inbox.put(command)
        if not self._own:
            self._serve()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._loop, name="inlay-engine", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread is available, and the command would wait for ever
                    self._thread = None
                    raise

    def _serve(self) -> None:
        """Run posted commands, unless another thread is at work. That thread runs them afterwards."""
        while self._inbox.waiting and self._turn.acquire(blocking=False):
            try:
                if self._inside:
                    return
                with self._working():
                    self._inbox.carry_out()
            finally:
                self._turn.release()

    # Working: the holder of the lock, or the engine's own thread

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Mark the lock's holder as inside, and hold signals back."""
        with HeldInterrupts():
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def _at_work(self, work: Callable[[], T]) -> T:
        """Take the lock, run posted commands, and work."""
        self._process.check()
        try:
            with self._turn:
                if self._inside:
                    raise InlayError(_INSIDE, code="engine.inside")
                self.check_open()
                with self._working():
                    self._inbox.carry_out()
                    return work()
        finally:
            self._serve()  # posted meanwhile

    def _loop(self) -> None:
        try:
            while not self._inbox.closed:
                if not self._engine.busy and not self._engine.idle_step():
                    self._inbox.wait()
                elif self._engine.stalled:
                    self._inbox.wait(_STALLED_S)  # a posted command ends the wait; deadlines are checked after it
                self._inbox.carry_out()
                self._step()
        except BaseException as error:
            self._die(error)

    def _step(self) -> None:
        """Take one step if there is work, and deliver its events."""
        if self._inbox.closed or not self._engine.busy:
            return
        try:
            heard = self._engine.step(on_leave=self._listeners.tell_leader, interruptible=not self._own)
            for request in dict.fromkeys(member.leader or member for member in heard):
                self._listeners.tell(request)  # once a step for all answers of a request
        except BaseException as error:
            if not self._own and not isinstance(error, Exception):  # Ctrl-C or the like ends the caller
                self._listeners.tell_ended()
                raise
            logger.exception("a step of the engine failed outside of its forward pass; every request ends")
            self._listeners.fail_all(fault_of(error))
            if self._engine.busy:  # a request cannot be removed, and the next step would fail alike
                self._die(error)

    # The end

    def _shut_down(self) -> None:
        if not self._inbox.closed:
            self._close(InlayError("the engine was shut down before the request ended", code="engine.shut_down"))

    def _die(self, error: BaseException) -> None:
        logger.critical("the engine has ended by a fault", exc_info=error)
        refusal = partial(EngineDeadError, f"the engine has ended by a fault, {fault_in_words(error)}; make a new LLM")
        self._inbox.refuse(refusal)
        self._close(refusal())

    def _close(self, error: InlayError) -> None:
        try:
            self._listeners.fail_all(error)
        finally:
            self._inbox.close(error)


def _nobody_waits(error: Exception) -> None:
    """Ignore the failure of a command, because its request has ended."""


def _was_shut_down() -> InlayError:
    return InlayError("the engine has been shut down; make a new LLM", code="engine.shut_down")
