"""The way in: which requests are under way, and whether new ones are let in."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.server.errors import refuse

#: What a server says about itself as long as it lives.
ALWAYS_OPEN = frozenset({"/health", "/ready", "/version", "/metrics"})

_RETRY_S = 5.0  # by then somebody else has taken over


class Flights:
    """The requests under way on one event loop, but for those that only ask how the server is."""

    def __init__(self) -> None:
        self.stopping = False
        self._count = 0
        self._news = asyncio.Event()  # of the last one's end, or of haste

    def begin(self) -> None:
        """Raises BodyError, status 503, once the server is stopping."""
        if self.stopping:
            raise stopped()
        self._count += 1

    def end(self) -> None:
        self._count -= 1
        if not self._count:
            self._news.set()

    def hurry(self) -> None:
        """Whoever waits for them waits no longer."""
        self._news.set()

    async def landed(self, seconds: float) -> bool:
        """Wait so long for all of them to end, once no more begin; returns whether they did."""
        self._news.clear()
        if self._count:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()
        return not self._count


def stopped() -> BodyError:
    """What a server that is stopping says to requests."""
    message = "the server is stopping; send the request again"
    return BodyError(message, code="server_stopping", status=503, retry_after_s=_RETRY_S)


class Gate:
    """ASGI middleware: counts requests in and out."""

    def __init__(self, app: ASGIApp, flights: Flights) -> None:
        self._app = app
        self._flights = flights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        try:
            self._flights.begin()
        except BodyError as error:
            await refuse(error, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._flights.end()
