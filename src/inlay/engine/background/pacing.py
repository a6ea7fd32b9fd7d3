"""Limits the interpreter time of background work beside the engine's passes.

A pass releases Python's lock in some hundred C calls. Each time it then waits until the other thread leaves a C call of
its own, such as one over a text of 8 MB. So threads that parse, tokenize or compile for one client can slow every pass
many times over. They rest after such work, long enough that the engine loses little time.
"""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.25  # of the engine's time that background work may take
SHORT_S = 0.002  # processor time too short for a rest
LONGEST_S = 2.0  # of one rest


def never_busy() -> bool:
    return False


class Pacer:
    """Computes the rests of background work. ``busy`` returns True if the engine has work; thread-safe."""

    def __init__(self, busy: Callable[[], bool] = never_busy) -> None:
        self._busy = busy

    @property
    def busy(self) -> bool:
        """True if background work delays the engine."""
        return self._busy()

    def rest_s(self, worked_s: float, owners: int = 1) -> float:
        """Seconds to rest after ``worked_s`` seconds of processor time, which ``owners`` owners share."""
        if worked_s < SHORT_S or not self.busy:
            return 0.0
        return min(worked_s * (owners / SHARE - 1), LONGEST_S)
