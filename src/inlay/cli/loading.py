"""What a command loads before it can answer, told on stderr: libraries take seconds to read, and weights minutes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0  # how often a step that goes on is told again


class LoadingLines:
    """Lines about the steps of a start.

    On a terminal every step is told when it begins. Elsewhere, as in the log of a service, short starts are silent. A
    step that goes on is told every ten seconds, on both.

    Args:
        say: writes a line.
        terminal: whether somebody waits in front of a terminal.
        every_s: seconds between two lines about a step that goes on.
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
        """Tell what is loaded now, like "the weights", and how many bytes of how many. Any thread may."""
        self._counted = f", {done / 2**30:.1f} of {total / 2**30:.1f} GiB" if total else ""
        if what != self._what:
            self._what = what
            if self._terminal:
                self._say(f"loading {what}")

    def end(self) -> None:
        """Say nothing more."""
        self._over.set()

    def _repeat(self) -> None:
        while not self._over.wait(self._every_s):
            seconds = time.monotonic() - self._began
            self._say(f"still loading {self._what}{self._counted} ({seconds:.0f} s so far)")


@contextmanager
def told_loading(what: str) -> Iterator[None]:
    """Tell on stderr that something is loaded in the block, like "the libraries"."""
    lines = LoadingLines(_print, terminal=sys.stderr.isatty())
    lines.report(what)
    try:
        yield
    finally:
        lines.end()


def _print(line: str) -> None:
    print(f"inlay: {line}", file=sys.stderr, flush=True)
