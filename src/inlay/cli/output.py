"""Output helpers of commands: files, tables, progress bars, and lines while a model loads, which takes minutes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inlay.errors import ParameterError


def check_outputs(paths: Iterable[Path | None], force: bool) -> None:
    """Raise ParameterError, before the work, if a file exists (unless ``force``) or has no folder."""
    for path in paths:
        if path is not None and os.path.exists(path) and not force:
            raise ParameterError(f"{path} exists; choose another name, or overwrite it with --force")
        if path is not None and not os.path.isdir(path.parent):
            raise ParameterError(f"{path}: there is no folder {path.parent}; make it first")


def report_folder(path: Path) -> None:
    """Make the directory of a report before hours of work. Raises ParameterError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"--report {path} cannot be made ({error.strerror}); give another directory") from None


@contextmanager
def output_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes UTF-8 text to a new or emptied file. Raises ParameterError on failure."""
    with _told(path):
        file = open(path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115 - closed below, where refusals are told as well

    def write(text: str) -> None:
        with _told(path):
            file.write(text)

    try:
        yield write
    finally:
        with _told(path):
            file.close()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ParameterError(f"{path}: cannot be written ({error.strerror}); give another path") from None


_WIDE = 1000  # columns, more than any table has


def stdout_console() -> Console:
    """Return a console for stdout, as wide as the terminal, or as the content without one."""
    return console_of(sys.stdout)


def console_of(stream: TextIO) -> Console:
    """Return a console for a stream, as wide as the terminal, or as the content without one."""
    console = Console(file=stream)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(file=stream, width=_WIDE)


_LINE_EVERY_S = 10.0  # without a terminal
last_line = time.monotonic()  # when the last line about progress was printed, or this process began


def _wait_s(every_s: float) -> float:
    """The seconds until the next line. Short steps that follow each other count together."""
    silent_s = time.monotonic() - last_line
    return every_s - silent_s if silent_s < every_s else every_s


def _said() -> None:
    global last_line
    last_line = time.monotonic()


@contextmanager
def token_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, or a line every ten seconds without a terminal. Yields report(done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    state, ended, began = [0, 0], threading.Event(), time.perf_counter()

    def lines() -> None:
        while not ended.wait(_wait_s(_LINE_EVERY_S)):
            counted = f": {state[0]:,} of {state[1]:,}" if state[1] else ""
            print(f"inlay: {what}{counted} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
            _said()

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            state[:] = done, total
            progress.update(task, completed=done, total=total)

        if not console.is_terminal:
            threading.Thread(target=lines, name="inlay-progress", daemon=True).start()
        try:
            yield report
        finally:
            ended.set()


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
                _said()

    def end(self) -> None:
        """Report nothing more."""
        self._over.set()

    def _repeat(self) -> None:
        while not self._over.wait(_wait_s(self._every_s)):
            seconds = time.monotonic() - self._began
            self._say(f"still loading {self._what}{self._counted} ({seconds:.0f} s so far)")
            _said()


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
