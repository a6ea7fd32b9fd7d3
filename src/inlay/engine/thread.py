"""Who steps an engine: a thread of its own, or whoever waits for an answer; never two at the same time.

OpenMP keeps a set of threads for every thread that computes, and where these outnumber the cores it lets them sleep
between two pieces of work, which makes a decode step much longer. So LLM computes on the thread of its caller, and
AsyncLLM, whose event loop must not wait, on one thread that does nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from inlay.engine.encoder import Task
from inlay.engine.engine import Engine
from inlay.errors import AbortedError, InlayError

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: Called on the engine's thread whenever a request has a new token or has ended. It must be quick and must not raise.
Listener = Callable[[Any], None]


class EngineThread:
    """Steps an engine while it has work.

    own: whether on a thread of its own, which begins with the first request and ends with ``stop``; else callers
        step it by ``pump``.
    """

    def __init__(self, engine: Engine, *, own: bool) -> None:
        self._engine = engine
        self._own = own
        self._turn = threading.RLock()  # whoever has it may touch the engine
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._listeners: dict[Task, Listener] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, request: Task, listener: Listener) -> None:
        """Queue a request. One that cannot be queued ends at once, with its error."""
        self._post(lambda: self._add(request, listener))

    def cancel(self, request: Task) -> Future[None]:
        """Give a request up, wherever it stands, with the answers that follow it; its listener hears no more of it."""
        return self.call(lambda: self._drop(request))

    def abort(self, request: Task) -> None:
        """Give a request up and tell its listener so."""
        self._post(lambda: self._end(request, AbortedError(f"request {request.id} was aborted")))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._post(run)
        if not self._own:
            self._act()
        return future

    def pump(self) -> None:
        """Take one step for everybody, where no thread of its own does."""
        with self._turn:
            self._act()
            if self._engine.busy:
                self._step()

    def stop(self) -> None:
        """End the thread behind its current step; requests under way end with an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if not self._own:
            with self._turn:
                self._fail_all(InlayError("the engine was shut down before the request ended"))

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise InlayError("the engine has been shut down; make a new LLM")
            if self._own and self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="inlay-engine", daemon=True)
                self._thread.start()
            self._inbox.append(action)
            self._wake.notify()

    def _loop(self) -> None:
        while self._wait():
            self.pump()
        self._fail_all(InlayError("the engine was shut down before the request ended"))

    def _wait(self) -> bool:
        """Until there is something to do; False where that is to stop."""
        with self._wake:
            while not (self._inbox or self._engine.busy or self._stopping):
                self._wake.wait()
            return not self._stopping

    def _act(self) -> None:
        """Do what was posted."""
        with self._turn:
            with self._wake:
                actions, self._inbox = self._inbox, []
            for action in actions:
                action()

    def _step(self) -> None:
        try:
            for request in dict.fromkeys(member.leader or member for member in self._engine.step()):
                self._tell(request)  # once a step, however many of its answers have news
        except Exception as error:
            logger.exception("a step of the engine failed; every request ends")
            self._fail_all(error)
        except BaseException:  # Ctrl-C on a caller's thread: those who were in the pass are told, and the caller stops
            for request in [request for request in self._listeners if request.failure is not None]:
                self._tell(request)
            raise

    def _add(self, request: Task, listener: Listener) -> None:
        self._listeners[request] = listener
        try:
            self._engine.add(request)
        except InlayError as error:
            self._end(request, error)

    def _drop(self, request: Task) -> None:
        self._listeners.pop(request, None)
        for member in request.family:
            if not member.finished:
                self._engine.release(member)

    def _tell(self, request: Task) -> None:
        listener = self._listeners.get(request)
        if listener is None:
            return
        if request.answered:
            del self._listeners[request]
        try:
            listener(request)
        except Exception:  # somebody's event loop has gone
            logger.exception("nobody can be told of request %s any more", request.id)
            self._drop(request)

    def _end(self, request: Task, error: BaseException) -> None:
        for member in request.family:
            if not member.finished:
                self._engine.release(member)
                member.error = error
        self._tell(request)

    def _fail_all(self, error: BaseException) -> None:
        for request in list(self._listeners):
            self._end(request, error)
