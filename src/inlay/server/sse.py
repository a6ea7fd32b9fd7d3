"""Server-sent events, in the form in which OpenAI sends them."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Send

from inlay.openai.failures import Failure
from inlay.server.errors import json_bytes

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events until it has many
]


class EventStream:
    """The events of one response. It begins with the first: what fails before can still have a status of its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

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
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
