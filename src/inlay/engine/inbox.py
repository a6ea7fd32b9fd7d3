"""What others want done between two steps of an engine: put by anybody at any moment, carried out by who steps it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from inlay.engine.faults import fault_of
from inlay.errors import InlayError


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do between two steps.

    fail: called with the reason, in place of ``do`` or after it has raised.
    """

    do: Callable[[], None]
    fail: Callable[[Exception], None]


class Inbox:
    """A queue that ends: whatever was put into it is carried out or fails.

    ``put`` and ``check_open`` take no lock and wait for nobody, so a finalizer may call them.

    interruptible: whether what stops a program, such as KeyboardInterrupt, is raised again behind the failure of the
        command that it came from.
    """

    def __init__(self, *, interruptible: bool) -> None:
        self._interruptible = interruptible
        self._queue: SimpleQueue[Command] = SimpleQueue()  # its put may be called in the middle of another one
        self._refusal: Callable[[], InlayError] | None = None
        self.closed = False

    @property
    def waiting(self) -> bool:
        """Whether there is something to carry out."""
        return not self._queue.empty()

    def check_open(self) -> None:
        """Raises InlayError, with the reason, where nothing more is taken."""
        if self._refusal is not None:
            raise self._refusal()

    def put(self, command: Command) -> None:
        """Have something done, or failed where nobody does anything any more."""
        self._queue.put(command)
        if self.closed:  # maybe since the caller's last look, and whoever closed it does not look again
            assert self._refusal is not None, "it is closed for a reason"
            self._fail_all(self._refusal())

    def wait(self, timeout: float | None = None) -> None:
        """Until there is something to carry out, or so many seconds are over; for a thread that does nothing else."""
        try:
            command = self._queue.get(timeout=timeout)
        except Empty:
            return
        self._carry_out(command)

    def carry_out(self) -> None:
        """Do all that has been put."""
        with suppress(Empty):
            while True:
                self._carry_out(self._queue.get_nowait())

    def refuse(self, refusal: Callable[[], InlayError]) -> None:
        """Take nothing more from now on. refusal: makes what ``check_open`` raises."""
        self._refusal = refusal

    def close(self, error: InlayError) -> None:
        """Carry out nothing more, behind ``refuse``: what is left fails with this error."""
        self.closed = True
        self._fail_all(error)

    def _carry_out(self, command: Command) -> None:
        try:
            command.do()
        except BaseException as error:
            command.fail(fault_of(error))
            if self._interruptible and not isinstance(error, Exception):
                raise

    def _fail_all(self, error: InlayError) -> None:
        with suppress(Empty):
            while True:
                self._queue.get_nowait().fail(error)
