"""A server of Redis's protocol in this process, which stalls, lies and disconnects on command."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

Reply = bytes


class Flood:
    """An endless answer, as fast as the client reads it.

    claim: its first bytes. ended: set when the client stops reading. bytes: the number of bytes sent.
    """

    _MOST = 1 << 30

    def __init__(self, claim: bytes) -> None:
        self._claim = claim
        self.bytes = 0
        self.ended = threading.Event()

    def send(self, connection: socket.socket) -> None:
        try:
            connection.sendall(self._claim)
            while self.bytes < self._MOST:
                self.bytes += connection.send(b"x" * 65536)
        finally:
            self.ended.set()


class FakeServer:
    """Strings by key, and the commands that a shared tier uses.

    stalls: names of commands without an answer. drips: True if an answer comes byte by byte without an end.
    floods: sent in place of a value. lie: turns the right answer of a command into a wrong one.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.lives: dict[bytes, int] = {}  # milliseconds that keys were given
        self.stalls: set[str] = set()
        self.drips = False
        self.floods: Flood | None = None
        self.lie: Callable[[str, Reply], Reply] | None = None
        self.asked: list[str] = []
        self._gone = threading.Event()
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._port = 0
        self.come_back()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def come_back(self) -> None:
        """Listen, at the same place as before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._gone.clear()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def go_away(self) -> None:
        """Close all connections, and take none."""
        self._gone.set()
        listener, self._listener = self._listener, None
        for each in [*self._connections, *([listener] if listener else [])]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._connections.clear()

    @property
    def gone(self) -> bool:
        return self._listener is None

    def right(self) -> None:
        """Stall and lie no more."""
        self.stalls, self.drips, self.floods, self.lie = set(), False, None, None

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as said:
            while command := _command(said):
                name = command[0].decode().upper()
                self.asked.append(name)
                if name in self.stalls:
                    continue
                reply = self._answer(name, command[1:])
                if self.lie is not None and name not in ("PING", "CLIENT", "SELECT"):
                    reply = self.lie(name, reply)
                if self.drips and name == "GETRANGE":
                    connection.sendall(b"$1000000\r\n")
                    while not self._gone.wait(0.01):
                        connection.sendall(b"x")
                if self.floods is not None and name == "GETRANGE":
                    self.floods.send(connection)
                connection.sendall(reply)

    def _answer(self, name: str, arguments: list[bytes]) -> Reply:
        key = arguments[0] if arguments else b""
        if name == "PING":
            return b"+PONG\r\n"
        if name == "EXISTS":
            return b":%d\r\n" % (key in self.values)
        if name == "STRLEN":
            return b":%d\r\n" % len(self.values.get(key, b""))
        if name == "GETRANGE":
            first, last = map(int, arguments[1:])
            part = self.values.get(key, b"")[first : last + 1]
            return b"$%d\r\n%b\r\n" % (len(part), part)
        if name == "SET":
            if key in self.values:
                return b"$-1\r\n"
            self.values[key] = arguments[1]
            self.lives.pop(key, None)
            if b"PX" in arguments[2:]:
                self.lives[key] = int(arguments[arguments.index(b"PX", 2) + 1])
            return b"+OK\r\n"
        if name == "PTTL":
            return b":%d\r\n" % (self.lives.get(key, -1) if key in self.values else -2)
        if name == "PEXPIRE":
            self.lives[key] = int(arguments[1])
            return b":%d\r\n" % (key in self.values)
        if name == "UNLINK":
            return b":%d\r\n" % (self.values.pop(key, None) is not None)
        return b"+OK\r\n" if name in ("CLIENT", "SELECT") else b"-ERR unknown command\r\n"


def _command(said: BinaryIO) -> list[bytes]:
    """The next command; none at the end."""
    line = said.readline()
    return [_argument(said) for _ in range(int(line[1:]))] if line else []


def _argument(said: BinaryIO) -> bytes:
    length = int(said.readline()[1:])
    return said.read(length + 2)[:-2]
