"""The listeners of running requests, and the ways a request ends: complete, dropped, aborted, or by a fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from inlay.engine.core import EngineCore
from inlay.engine.encoder import Task
from inlay.engine.inbox import fault_of
from inlay.engine.request import Request
from inlay.errors import AbortedError, ParameterError

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
