"""A clock that tests set forward, in place of waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

_YEAR_9999 = 253_370_764_800.0


class Clock:
    """The clocks of the module ``time``, for the whole process.

    ``time`` and ``monotonic``, which lifetimes go by, stand still unless a test advances them. ``perf_counter``, which
    measures durations, runs on until ``stop``. Waits for threads keep the system's clock, timers of asyncio do not.

    Python prints no date after the year 9999. A server of another test would end if it were told such a time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._jumped_s = self._ahead_s = 0.0
        self._time, self._monotonic = time.time(), time.monotonic()
        self._perf_counter: Callable[[], float] = time.perf_counter
        monkeypatch.setattr(time, "time", lambda: self._time + self._ahead_s + self._jumped_s)
        monkeypatch.setattr(time, "monotonic", lambda: self._monotonic + self._ahead_s)
        monkeypatch.setattr(time, "perf_counter", lambda: self._perf_counter() + self._ahead_s)

    def advance(self, seconds: float) -> None:
        """Let time pass on all clocks."""
        self._check(seconds)
        self._ahead_s += seconds

    def jump(self, seconds: float) -> None:
        """Set the calendar forward, or back with a negative number, as an administrator may."""
        self._check(seconds)
        self._jumped_s += seconds

    def _check(self, seconds: float) -> None:
        assert time.time() + seconds < _YEAR_9999, "see the class"

    def stop(self) -> None:
        """Let ``perf_counter`` stand still as well."""
        now = self._perf_counter()
        self._perf_counter = lambda: now


class ManualClock:
    """A clock to hand in, which shows ``now`` until a test changes it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> Any:
        return self.now
