"""Commands from other threads that run between two steps of an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from inlay.errors import DeviceMemoryError, InlayError


def fault_of(error: BaseException) -> Exception:
    """The error to report to a waiting caller.

    A BaseException, such as a panic in a library written in Rust, would end the caller's thread; it becomes a
    RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()  # frees the memory of the failed pass; no effect without a device
        out = DeviceMemoryError(
            "the device had no memory left for this pass; set a smaller kv_memory or max_num_batched_tokens"
        )
        out.__cause__ = error
        return out
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run between two steps. ``fail`` is called with the reason instead of ``do``, or after ``do`` has
    raised.
    """

    do: Callable[[], None]
    fail: Callable[[Exception], None]


class Inbox:
    """A queue of commands that can be closed: every command runs or fails.

    ``put`` and ``check_open`` take no lock and never block, so a finalizer may call them.

    Args:
        interruptible: raise KeyboardInterrupt and the like again after failing the command that caused it.
    """

    def __init__(self, *, interruptible: bool) -> None:
        self._interruptible = interruptible
        self._queue: SimpleQueue[Command] = SimpleQueue()  # its put is reentrant
        self._refusal: Callable[[], InlayError] | None = None
        self.closed = False

    @property
    def waiting(self) -> bool:
        """True if commands are queued."""
        return not self._queue.empty()

    def check_open(self) -> None:
        """Raise InlayError, with the reason, if no more commands are accepted."""
        if self._refusal is not None:
            raise self._refusal()

    def put(self, command: Command) -> None:
        """Queue a command. Fails it at once after close."""
        self._queue.put(command)
        if self.closed:  # it may have closed after the caller's check, and close() does not look again
            assert self._refusal is not None, "it is closed for a reason"
            self._fail_all(self._refusal())

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a command, at most ``timeout`` seconds, and run it. For a thread that does nothing else."""
        try:
            command = self._queue.get(timeout=timeout)
        except Empty:
            return
        self._carry_out(command)

    def carry_out(self) -> None:
        """Run all queued commands."""
        with suppress(Empty):
            while True:
                self._carry_out(self._queue.get_nowait())

    def refuse(self, refusal: Callable[[], InlayError]) -> None:
        """Accept no more commands. ``refusal`` makes the error of ``check_open``."""
        self._refusal = refusal

    def close(self, error: InlayError) -> None:
        """Run no more commands; the queued ones fail with this error. Call ``refuse`` first."""
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
