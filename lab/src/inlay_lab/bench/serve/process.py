"""A server in a process of its own, as long as it is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_STOP_S = 60.0


@contextmanager
def serving(options: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``inlay serve`` with these options on a free port, and its URL, until the end of the block.

    Behind the block ``returncode`` says how it ended. Exits where the server does not start.
    """
    command = [sys.executable, "-m", "inlay", "serve", *options, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r" on (http://\S+)/v1 ", process.stdout.readline())
        if found is None:
            sys.exit("the server did not start")
        yield process, found[1]
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
