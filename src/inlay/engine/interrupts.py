"""Holds signals back while the engine works on a caller's thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

#: After this many seconds, a signal that comes again is no longer held back: the work may hang.
PATIENCE_S = 10.0
#: Signals that applications handle, some of them with an exception. Those of profilers are missing.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGBREAK")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class HeldInterrupts:
    """A context in which signals with a handler in Python wait for the end of the block.

    Python calls a handler between any two lines. If it raises, as it does for Ctrl-C, a step would end in the middle:
    tokens would count as computed that never were, and slots of the pool would be lost. A signal that comes several
    times counts once. Only the main thread gets signals, so nothing changes on others.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: dict[int, float] = {}  # when each signal came first
        self._over = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        except BaseException:  # of a handler that was not held yet
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._over = True  # a handler that could not be restored is called at once
        if not self._came:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            return
        with ExitStack() as stack:  # each is restored and called, even if another one raises
            for number in self._came:
                stack.callback(self._handlers[number], number, None)
            for number, handler in self._handlers.items():
                stack.callback(signal.signal, number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = self._came.setdefault(number, now)
        if self._over or now - first > PATIENCE_S:
            signal.signal(number, self._handlers[number])
            self._handlers[number](number, frame)
