"""Holds Ctrl-C back while the engine works on a caller's thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

#: After this many seconds, a further Ctrl-C is no longer held back: the work may hang.
PATIENCE_S = 10.0


class HeldInterrupts:
    """A context in which Ctrl-C waits for the end of the block.

    Python raises KeyboardInterrupt between any two lines. In the middle of a step, this would leave tokens that count
    as computed and never were. Several presses count as one. Other threads than the main one get no signals, so nothing
    changes there.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._since: float | None = None  # when the first signal came

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                with suppress(ValueError):  # a subinterpreter gets no signals
                    signal.signal(signal.SIGINT, self._hold)
                    self._before = handler

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._since is not None:
                self._before(signal.SIGINT, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > PATIENCE_S and self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before(number, frame)
