"""Who steps an engine: a thread of its own, or whoever waits for an answer; never two at the same time.

OpenMP keeps a set of threads for every thread that computes, and where these outnumber the cores it lets them sleep
between two pieces of work, which makes a decode step much longer. So LLM computes on the thread of its caller, and
AsyncLLM, whose event loop must not wait, on one thread that does nothing else.

Who may touch the engine, and when: only who has the turn, and nobody in the middle of a step. All others post what is
to be done. That includes the thread that steps, where the garbage collector may end an abandoned generator at any line.
What is posted is carried out

- on a thread of its own, before the next step;
- on callers' threads, at once where nobody has the turn, else by whoever has it, when the step is over.

To post is never to wait, so finalizers may. ``run`` and ``pump`` wait for the turn, and refuse to be called from inside
a step, for whose end they would wait for ever.

An engine ends once: by ``stop``, or by a fault that goes on. Whoever is under way then hears of it, what was posted is
carried out or fails, and whatever comes later is refused with the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TypeVar

from inlay.engine.core import Engine
from inlay.engine.encoder import Task
from inlay.engine.faults import fault_of
from inlay.engine.forks import ThisProcess
from inlay.engine.inbox import Command, Inbox
from inlay.engine.listeners import Listener, Listeners
from inlay.errors import AbortedError, EngineDeadError, InlayError
from inlay.wording import fault_in_words

logger = logging.getLogger(__name__)

T = TypeVar("T")
_STALLED_S = 0.02  # between two looks where all wait for a lower tier

_INSIDE = "this is a call from inside a step of the engine (a finalizer, or a callback); make it when the step is over"


class EngineThread:
    """Steps an engine while it has work.

    own: whether on a thread of its own, which begins with the first request and ends with ``stop``; else callers
        step it by ``pump``.
    """

    def __init__(self, engine: Engine, *, own: bool) -> None:
        self._engine = engine
        self._own = own
        self._inbox = Inbox(interruptible=not own)
        self._turn = threading.RLock()  # among callers' threads
        self._inside = False  # whether who has the turn is at work: a call from inside a step finds it set
        self._listeners = Listeners(engine, interruptible=not own)
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._process = ThisProcess()

    @property
    def listeners(self) -> int:
        """How many of those under way have somebody who hears of them."""
        return len(self._listeners)

    def submit(self, request: Task, listener: Listener) -> None:
        """Queue a request. One that cannot be queued ends at once, with its error."""
        add = partial(self._listeners.add, request, listener)
        self._post(Command(add, partial(self._listeners.refuse, request, listener)))

    def finish(self, request_id: str, index: int) -> None:
        """End one answer of a request, whose listener has found that it is whole, and hears no more of it."""
        with suppress(InlayError):  # where nothing is done any more, it has ended
            self._post(Command(lambda: self._listeners.finish(request_id, index), _nobody_waits))

    def cancel(self, request_id: str) -> None:
        """Give a request up, wherever it stands, with all its answers; its listener hears no more of it."""
        with suppress(InlayError):
            self._post(Command(lambda: self._listeners.drop(request_id), _nobody_waits))

    def abort(self, request_id: str) -> None:
        """Give a request up and tell its listener so."""
        error = AbortedError(f"request {request_id} was aborted")
        with suppress(InlayError):
            self._post(Command(lambda: self._listeners.abort(request_id, error), _nobody_waits))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called between two steps. Inside a step nobody may wait for that; see ``run``."""
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(function())

        def fail(error: Exception) -> None:
            with suppress(InvalidStateError):  # whoever waited has given up
                future.set_exception(error)

        self._post(Command(do, fail))
        return future

    def run(self, function: Callable[[], T]) -> T:
        """Call a function between two steps, and wait for what it returns. Raises InlayError inside a step."""
        self._process.check()
        if not self._own:
            return self._at_work(function)
        if threading.current_thread() is self._thread:
            raise InlayError(_INSIDE, code="engine.inside")
        return self.call(function).result()

    def pump(self) -> None:
        """Take one step for everybody, where no thread of its own does. Raises InlayError inside a step.

        Where all wait for a lower tier, so does this, for a moment and without the turn.
        """
        self._at_work(self._step)
        if self._engine.stalled:
            self._engine.residency.wait(_STALLED_S)

    def stop(self) -> None:
        """End the engine behind its current step; requests under way end with an error. Nothing in a forked process."""
        if self._process.left:
            return
        if not self._stopping:
            self._stopping = True
            self._inbox.refuse(_was_shut_down)
        with self._starting:
            thread = self._thread
        if self._own and thread is None:  # it has never begun
            self._shut_down()
            return
        self._inbox.put(Command(self._shut_down, _nobody_waits))
        if thread is None:
            with self._turn:  # behind whoever is at work; inside a step that is this thread, which ends it then
                pass
            self._serve()
        elif thread is not threading.current_thread():
            thread.join()

    def check_open(self) -> None:
        """Raises InlayError, with the reason, where nothing is done any more."""
        self._process.check()
        self._inbox.check_open()

    # Posting: on any thread, at any moment

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
                except RuntimeError:  # the system has no more; what is posted would wait for ever
                    self._thread = None
                    raise

    def _serve(self) -> None:
        """Carry out what is posted, unless somebody is at work, who does this when that is over."""
        while self._inbox.waiting and self._turn.acquire(blocking=False):
            try:
                if self._inside:
                    return
                self._inside = True
                try:
                    self._inbox.carry_out()
                finally:
                    self._inside = False
            finally:
                self._turn.release()

    # Working: whoever has the turn, or the engine's own thread

    def _at_work(self, work: Callable[[], T]) -> T:
        """Take the turn, carry out what is posted, and work."""
        self._process.check()
        try:
            with self._turn:
                if self._inside:
                    raise InlayError(_INSIDE, code="engine.inside")
                self.check_open()
                self._inside = True
                try:
                    self._inbox.carry_out()
                    return work()
                finally:
                    self._inside = False
        finally:
            self._serve()  # what was posted meanwhile

    def _loop(self) -> None:
        try:
            while not self._inbox.closed:
                if not self._engine.busy and not self._engine.idle_step():
                    self._inbox.wait()
                elif self._engine.stalled:
                    self._inbox.wait(_STALLED_S)  # what arrives is posted; deadlines are looked at in between
                self._inbox.carry_out()
                self._step()
        except BaseException as error:
            self._die(error)

    def _step(self) -> None:
        """Take one step if there is work, and tell those who have news."""
        if self._inbox.closed or not self._engine.busy:
            return
        try:
            heard = self._engine.step(on_leave=self._listeners.tell_leader, interruptible=not self._own)
            for request in dict.fromkeys(member.leader or member for member in heard):
                self._listeners.tell(request)  # once a step, however many of its answers have news
        except BaseException as error:
            if not self._own and not isinstance(error, Exception):  # Ctrl-C or the like: the caller is to stop
                self._listeners.tell_ended()
                raise
            logger.exception("a step of the engine failed outside of its forward pass; every request ends")
            self._listeners.fail_all(fault_of(error))
            if self._engine.busy:  # with one that cannot be taken out: the next step would fail like this one
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
    """For a command whose failure is nobody's: what it would end has ended."""


def _was_shut_down() -> InlayError:
    return InlayError("the engine has been shut down; make a new LLM", code="engine.shut_down")
