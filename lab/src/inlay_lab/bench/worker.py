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
from pathlib import Path
from typing import Any

import psutil

from inlay.errors import ModelError


def module_command(module: str, words: Sequence[object]) -> list[object]:
    """The command that runs a module of the lab with these arguments."""
    return [sys.executable, "-m", module, *words]


class Worker:
    """The process of a program. Its first line reports that it is ready.

    Args:
        name: Of the engine, for messages.
        command: The program with its arguments; see ``module_command``.
        remedy: How to run without it, for messages.
        errors: Destination of its standard error, as in ``subprocess``; None for this process's own.

    Attributes:
        first: The first line.

    Raises:
        ModelError: The process failed to start.
    """

    def __init__(
        self, name: str, command: Sequence[object], remedy: str, errors: int | None = subprocess.DEVNULL
    ) -> None:
        self._name = name
        self._remedy = remedy
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            self.first = self._read()
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

    def peak_bytes(self) -> int:
        """The peak resident memory of the process and of its children. Linux only: 0 elsewhere."""
        with suppress(psutil.Error):
            parent = psutil.Process(self._process.pid)
            return sum(_peak_bytes(each.pid) for each in (parent, *parent.children(recursive=True)))
        return 0

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


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
