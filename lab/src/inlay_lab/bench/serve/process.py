"""A server in a separate process for the time of a measurement."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_STOP_S = 60.0


@contextmanager
def serving(options: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``inlay serve`` on a free port within a block; yields the process and its URL.

    After the block ``returncode`` is set. Exits if the server does not start.
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
