"""Progress lines on stderr while a command loads libraries, which takes seconds, and weights, which takes minutes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0  # seconds between two lines about one step


class LoadingLines:
    """Lines about the steps of a start.

    On a terminal every step is reported when it begins. Elsewhere, as in a service's log, short starts are silent. A
    long step is reported again every ten seconds, on both.

    Args:
        say: Writes a line.
        terminal: True if the output is a terminal.
        every_s: Seconds between two lines about a long step.
    """

    def __init__(self, say: Callable[[str], object], *, terminal: bool, every_s: float = EVERY_S) -> None:
        self._say = say
        self._terminal = terminal
        self._every_s = every_s
        self._what = ""
        self._counted = ""
        self._began = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._repeat, name="loading-lines", daemon=True).start()

    def report(self, what: str, done: int = 0, total: int = 0) -> None:
        """Report the present step, like "the weights", with the bytes loaded so far and in all. Thread-safe."""
        self._counted = f", {done / 2**30:.1f} of {total / 2**30:.1f} GiB" if total else ""
        if what != self._what:
            self._what = what
            if self._terminal:
                self._say(f"loading {what}")

    def end(self) -> None:
        """Report nothing more."""
        self._over.set()

    def _repeat(self) -> None:
        while not self._over.wait(self._every_s):
            seconds = time.monotonic() - self._began
            self._say(f"still loading {self._what}{self._counted} ({seconds:.0f} s so far)")


@contextmanager
def told_loading(what: str) -> Iterator[None]:
    """Report on stderr that something is loaded in the block, like "the libraries"."""
    lines = LoadingLines(_print, terminal=sys.stderr.isatty())
    lines.report(what)
    try:
        yield
    finally:
        lines.end()


def _print(line: str) -> None:
    print(f"inlay: {line}", file=sys.stderr, flush=True)
