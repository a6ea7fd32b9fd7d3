"""Requests under way: counted in and out, refused once the server is stopping, and waited for at its end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.server.errors import refuse
from inlay.server.routes import route_of

_RETRY_S = 5.0  # by then somebody else has taken over


class InFlight:
    """The requests under way on one event loop, but for those that only ask how the server is."""

    def __init__(self) -> None:
        self.stopping = False
        self._count = 0
        self._changed = asyncio.Event()  # set at the last one's end, or where nobody is to wait any longer

    def begin(self) -> None:
        """Raises BodyError, status 503, once the server is stopping."""
        if self.stopping:
            raise stopping_error()
        self._count += 1

    def end(self) -> None:
        self._count -= 1
        if not self._count:
            self._changed.set()

    def stop_waiting(self) -> None:
        """Whoever waits for them waits no longer."""
        self._changed.set()

    async def drained(self, seconds: float) -> bool:
        """Wait so long for all of them to end, once no more begin; returns whether they did."""
        self._changed.clear()
        if self._count:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        return not self._count


def stopping_error() -> BodyError:
    """What a server that is stopping says to requests."""
    message = "the server is stopping; send the request again"
    return BodyError(message, code="server_stopping", status=503, retry_after_s=_RETRY_S)


class DrainMiddleware:
    """ASGI middleware: counts requests in and out."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_of(scope["path"]).always_open:
            await self._app(scope, receive, send)
            return
        try:
            self._in_flight.begin()
        except BodyError as error:
            await refuse(error, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight.end()
