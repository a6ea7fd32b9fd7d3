"""Server-sent events, in the form in which OpenAI sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from starlette.types import Send

from inlay.openai.failures import Failure
from inlay.server.errors import json_bytes

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events until it has many
]


class EventStream:
    """The events of one response. It begins with the first: what fails before can still have a status of its own.

    keep_alive_s: how long it may be silent under ``kept_alive``. Then it begins, whatever comes later, with a comment,
    which clients skip: proxies close connections on which nothing comes for long.
    """

    def __init__(self, send: Send, keep_alive_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._writing = asyncio.Lock()
        self._written_at = asyncio.get_running_loop().time()
        self.begun = False

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send comments in every silence, until the end of the block."""
        comments = asyncio.create_task(self._comment())
        try:
            yield
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)  # whoever writes next meets what it met

    async def _comment(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            left = self._written_at + self._keep_alive_s - clock()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._write(b": keep-alive\n\n", more=True)

    async def write(self, documents: Iterable[str]) -> None:
        """Send documents of JSON, together."""
        events = "".join([f"data: {document}\n\n" for document in documents])
        if events:
            await self._write(events.encode(errors="backslashreplace"), more=True)

    async def end(self, documents: Iterable[str] = ()) -> None:
        """Send the last documents, and that this is all."""
        await self.write(documents)
        await self._write(b"data: [DONE]\n\n", more=False)

    async def fail(self, failure: Failure) -> None:
        """Say that there will be no more, and why."""
        await self._write(b"data: " + json_bytes(failure.body()) + b"\n\n", more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        async with self._writing:
            if not self.begun:
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self.begun = True  # not before: a comment may be cancelled in here
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            self._written_at = asyncio.get_running_loop().time()
