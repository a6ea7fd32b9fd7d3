"""What others want done between two steps of an engine: put by anybody at any moment, carried out by who steps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from inlay.engine.engine import fault_of
from inlay.errors import InlayError


@dataclass(frozen=True, slots=True)
class Order:
    """Something to do.

    fail: called with the reason, in place of ``do`` or after it has raised. is_pass: whether it takes as long as a
        step.
    """

    do: Callable[[], None]
    fail: Callable[[Exception], None]
    is_pass: bool = False


class Orders:
    """A queue that ends: whatever was put into it is carried out or fails.

    ``put`` and ``check_open`` take no lock and wait for nobody, so a finalizer may call them.

    interruptible: whether what stops a program, such as KeyboardInterrupt, is raised again behind the failure of the
        order that it came from.
    """

    def __init__(self, *, interruptible: bool) -> None:
        self._interruptible = interruptible
        self._inbox: SimpleQueue[Order] = SimpleQueue()  # its put may be called in the middle of another one
        self._passes: deque[Order] = deque()  # taken from the inbox
        self._refusal: Callable[[], InlayError] | None = None
        self.closed = False

    @property
    def waiting(self) -> bool:
        """Whether there is something to carry out."""
        return bool(self._passes) or not self._inbox.empty()

    def check_open(self) -> None:
        """Raises InlayError, with the reason, where nothing more is taken."""
        if self._refusal is not None:
            raise self._refusal()

    def put(self, order: Order) -> None:
        """Have something done, or failed where nobody does anything any more."""
        self._inbox.put(order)
        if self.closed:  # maybe since the caller's last look, and whoever closed it does not look again
            assert self._refusal is not None, "it is closed for a reason"
            self._fail_all(self._refusal())

    def wait(self) -> None:
        """Until there is something to carry out; for a thread that does nothing else."""
        if not self._passes:
            self._take(self._inbox.get())

    def carry_out(self) -> None:
        """Do all that has been put, but of what takes as long as a step one thing at a time."""
        with suppress(Empty):
            while True:
                self._take(self._inbox.get_nowait())
        if self._passes:
            self._carry_out(self._passes.popleft())

    def refuse(self, refusal: Callable[[], InlayError]) -> None:
        """Take nothing more from now on. refusal: makes what ``check_open`` raises."""
        self._refusal = refusal

    def close(self, error: InlayError) -> None:
        """Carry out nothing more, behind ``refuse``: what is left fails with this error."""
        self.closed = True
        self._fail_all(error)

    def _take(self, order: Order) -> None:
        if order.is_pass:
            self._passes.append(order)
        else:
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        try:
            order.do()
        except BaseException as error:
            order.fail(fault_of(error))
            if self._interruptible and not isinstance(error, Exception):
                raise

    def _fail_all(self, error: InlayError) -> None:
        with suppress(IndexError):
            while True:
                self._passes.popleft().fail(error)
        with suppress(Empty):
            while True:
                self._inbox.get_nowait().fail(error)
