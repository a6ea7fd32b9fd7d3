"""Who hears of the requests under way, and how each of these ends: whole, given up, aborted, or by a fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from inlay.engine.core import Engine
from inlay.engine.encoder import Task
from inlay.engine.faults import fault_of
from inlay.engine.request import Request
from inlay.errors import AbortedError, ParameterError

logger = logging.getLogger(__name__)

#: Called by whoever steps the engine, with what is new of a request, at most once a step. It must be quick and must not
#: raise.
Listener = Callable[[Any], None]


class Listeners:
    """The requests under way by their ids, each with who hears of it. For who has the engine's turn; see thread.py.

    interruptible: whether what stops a program, such as Ctrl-C on a caller's thread, is raised again.
    """

    def __init__(self, engine: Engine, *, interruptible: bool) -> None:
        self._engine = engine
        self._interruptible = interruptible
        self._known: dict[str, tuple[Task, Listener]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, request: Task, listener: Listener) -> None:
        """Queue a request. Raises ParameterError where its id is taken."""
        if request.id in self._known:
            raise ParameterError(f"request_id '{request.id}' is taken by a request that is under way; give another one")
        self._known[request.id] = request, listener
        self._engine.add(request)

    def refuse(self, request: Task, listener: Listener, error: Exception) -> None:
        """End a request that could not be queued, and tell."""
        self._fail(request, error)
        self._deliver(request, listener)

    def drop(self, request_id: str) -> None:
        """Give a request up, wherever it stands; nobody hears of it."""
        request, _ = self._known.pop(request_id, (None, None))
        if request is not None:
            for member in request.family:
                if not member.finished:
                    self._release(member)

    def finish(self, request_id: str, index: int) -> None:
        """End one answer of a request, which is whole; nobody hears of it."""
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
        """End a request with an error, and tell."""
        request, _ = self._known.get(request_id, (None, None))
        if request is not None:
            self._end(request, error)

    def _end(self, request: Task, error: Exception) -> None:
        self._fail(request, error)
        self.tell(request)

    def _fail(self, request: Task, error: Exception) -> None:
        for member in request.family:
            if not member.finished:
                member.error = error  # first: of what failed in the middle of a step, the store keeps nothing
                self._release(member)

    def _release(self, member: Task) -> None:
        try:
            self._engine.release(member)
        except Exception:  # whoever waits for it hears of its end all the same
            logger.exception("request %s could not be taken out of the engine", member.id)

    def _listener_of(self, request: Task) -> Listener | None:
        """Who hears of it; None where it was given up, though another one may go by its id by now."""
        named, listener = self._known.get(request.id, (None, None))
        return listener if named is request else None

    def _forget(self, request: Task) -> None:
        if self._listener_of(request) is not None:
            del self._known[request.id]

    def tell(self, request: Task) -> None:
        """Tell what is new of a request, if anybody hears of it."""
        listener = self._listener_of(request)
        if listener is not None:
            self._deliver(request, listener)

    def _deliver(self, request: Task, listener: Listener) -> None:
        try:
            self._hand_over(request, listener)
        except BaseException as error:
            if self._interrupts(error):  # the listener may have heard of a part
                self._lose(request, AbortedError(f"request {request.id}: its pass was interrupted"))
                raise
            logger.exception("there is no telling of request %s; it ends", request.id)
            self._lose(request, fault_of(error))
            with suppress(Exception):  # somebody's event loop may have gone
                listener(request.failures())
        if request.answered:
            self._forget(request)

    def _hand_over(self, request: Task, listener: Listener) -> None:
        if events := request.events():
            listener(events)
            request.heard()

    def _lose(self, request: Task, error: Exception) -> None:
        """End a request whose listener has failed: all its answers, since some may have ended without being told."""
        self._fail(request, error)
        for member in request.family:
            member.error = error

    def tell_leader(self, member: Task) -> None:
        """Tell of one that has left before the pass. Where that fails, it is told again behind the pass: its other
        answers may be in it, and must not be ended now."""
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
        """End all that are under way with an error, and tell."""
        for request, _ in list(self._known.values()):
            self._end(request, error)

    def tell_ended(self) -> None:
        """Tell of those that are over, where a step was interrupted."""
        for request, _ in list(self._known.values()):
            if request.answered or request.failure is not None:
                self.tell(request)

    def _interrupts(self, error: BaseException) -> bool:
        """Whether it is no fault, but Ctrl-C or the like on a caller's thread, who is to stop."""
        return self._interruptible and not isinstance(error, Exception)
