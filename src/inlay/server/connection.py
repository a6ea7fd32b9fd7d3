"""The connection of one client during its answer, and the server-sent events on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType, TracebackType

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client has left."""


class Connection:
    """A context that ends its task with ClientGoneError if the client disconnects, or leaves sent data unread.

    If a client reads slowly, ``send`` waits. The engine continues meanwhile, and only its latest output is kept.

    Args:
        scope: the ASGI scope.
        receive: ASGI's receive, after the request's body.
        send: ASGI's send.
        slow_s: seconds that a client may leave data unread.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, slow_s: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._slow_s = slow_s
        self._sending_since: float | None = None
        self._complete = False
        self._gone = False

    async def __aenter__(self) -> Connection:
        task = asyncio.current_task()
        assert task is not None, "an ASGI application runs in a task"
        self._task = task
        self._cancelled = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._listener = self._loop.create_task(self._listen())
        self._timer = self._loop.call_later(self._slow_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._complete = True
        self._listener.cancel()
        self._timer.cancel()
        if self._gone and self._task.uncancel() <= self._cancelled and kind is asyncio.CancelledError:
            raise ClientGoneError from error

    @property
    def request_id(self) -> str | None:
        """The id of the request, as its X-Request-Id says."""
        found: str | None = self._scope.get("state", {}).get("request_id")
        return found

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True  # after the last byte, servers report a disconnect too
        self._sending_since = self._loop.time()
        await self._send(message)
        self._sending_since = None

    async def respond(self, response: Response) -> None:
        """Send a complete response."""
        await response(self._scope, self._receive, self.send)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _look(self) -> None:
        """Check from time to time if sent data has been unread for too long."""
        left = self._slow_s
        if self._sending_since is not None:
            left -= self._loop.time() - self._sending_since
        if left <= 0:
            logger.warning("the client has read nothing for %g seconds; its request is aborted", self._slow_s)
            self._leave()
        else:
            self._timer = self._loop.call_later(left, self._look)

    def _leave(self) -> None:
        if not self._complete and not self._gone:
            self._gone = True
            self._task.cancel()


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise buffer events
]


class EventStream:
    """The events of one response. The first event starts it, so earlier failures can have their own status.

    Args:
        send: ASGI's send.
        keep_alive_s: seconds of silence under ``kept_alive`` until a comment is sent. The comment also starts the
            response. Clients skip it, and proxies do not close the connection.
        headers: further headers of the response.
    """

    def __init__(self, send: Send, keep_alive_s: float, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._send = send
        self._headers = [*_HEADERS, *((name.lower().encode(), value.encode()) for name, value in headers.items())]
        self._keep_alive_s = keep_alive_s
        self._writing = asyncio.Lock()
        self._written_at = asyncio.get_running_loop().time()
        self.begun = False

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send comments during silence, until the end of the block."""
        comments = asyncio.create_task(self._comment())
        try:
            yield
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)  # the next write meets the same exception

    async def _comment(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            left = self._written_at + self._keep_alive_s - clock()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._write(b": keep-alive\n\n", more=True)

    async def write(self, events: Iterable[str]) -> None:
        """Send some events together."""
        text = "".join(events)
        if text:
            await self._write(text.encode(errors="backslashreplace"), more=True)

    async def end(self, events: Iterable[str]) -> None:
        """Send the last events and end the response."""
        *before, last = events
        await self.write(before)
        await self._write(last.encode(errors="backslashreplace"), more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        async with self._writing:
            if not self.begun:
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                self.begun = True  # set only now, because a comment may be cancelled during the send
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            self._written_at = asyncio.get_running_loop().time()
