"""Another engine in a separate process, asked and answering in lines of JSON.

Two OpenMP runtimes in one process would fight for the cores, and two engines for a device's memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from inlay.errors import ModelError


class Worker:
    """The process of a module. Its first line reports that it is ready.

    Args:
        name: Of the engine, for messages.
        words: Arguments of the program.
        remedy: How to run without it, for messages.
        errors: Destination of its standard error, as in ``subprocess``; None for this process's own.

    Raises:
        ModelError: The process failed to start.
    """

    def __init__(
        self, name: str, module: str, words: Sequence[object], remedy: str, errors: int | None = subprocess.DEVNULL
    ) -> None:
        self._name = name
        self._remedy = remedy
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to one line. Raises ModelError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its last line has the reason
        return self._read()

    def close(self) -> None:
        """Kill it and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        ended = {"error": f"{self._name} ended with status {self._process.wait()}"} if not line else None
        said: dict[str, Any] = ended or json.loads(line)
        if "error" in said:
            raise ModelError(f"{said['error']}; {self._remedy}")
        return said
