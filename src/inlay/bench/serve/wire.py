"""A connection to a server, as little as it takes: the clients of a load share the cores with the server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit


class Wire:
    """HTTP/1.1, one request after another. url: of the server, without a path."""

    def __init__(self, url: str) -> None:
        found = urlsplit(url)
        self._host, self._port = found.hostname, found.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: Any = None) -> int:
        """Send a request; returns the status of the response, whose parts are to be read next. Raises OSError."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        data = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if data else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        heads = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        found = re.search(r"content-length: (\d+)", heads)
        self._length = None if found is None else int(found[1])
        return int(heads.split()[1])

    async def parts(self) -> AsyncIterator[bytes]:
        """The response's body, as it comes. Raises EOFError where it ends too early."""
        assert self._streams is not None, "a request was sent"
        reader, _ = self._streams
        if self._length is not None:
            yield await reader.readexactly(self._length)
            return
        while size := int(await reader.readline() or b"0", 16):
            yield (await reader.readexactly(size + 2))[:-2]
        if await reader.readline() != b"\r\n":
            raise EOFError("the connection was closed in the middle of a response")

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """The status and the body of a response."""
        status = await self.send(method, path, body)
        return status, b"".join([part async for part in self.parts()])

    def leave(self) -> None:
        """Hang up; the next request takes a new connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
