"""How much of the interpreter goes to work that runs beside the engine's passes.

A pass gives Python's lock up at some hundred calls into C, and each time waits until whoever took it comes out of a
call of its own, such as one over a text of 8 MB. So threads that parse, tokenize and compile for one client can make
the passes of all others many times as long, without any of their work being long. They rest behind it, for so long
that little of the engine's time is lost.
"""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.25  # of the engine's time that work beside it may take
SHORT_S = 0.002  # of processor time: what is not worth a rest
LONGEST_S = 2.0  # of one rest


def never_busy() -> bool:
    return False


class Pacer:
    """Tells work beside an engine how long to rest. busy: whether the engine has anything to do, from any thread."""

    def __init__(self, busy: Callable[[], bool] = never_busy) -> None:
        self._busy = busy

    @property
    def busy(self) -> bool:
        """Whether anybody is held up by work beside the engine."""
        return self._busy()

    def rest_s(self, worked_s: float, owners: int = 1) -> float:
        """Seconds to rest behind work that took so much processor time; owners: whose work shares the time."""
        if worked_s < SHORT_S or not self.busy:
            return 0.0
        return min(worked_s * (owners / SHARE - 1), LONGEST_S)
