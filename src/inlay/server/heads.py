"""Heads: of requests, for which Uvicorn would wait for ever, and of answers, which HEAD asks for alone."""

from __future__ import annotations

import asyncio

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol


class PromptHeads(H11Protocol):
    """Uvicorn's protocol (``http=`` of its Config), but a request's head has to come whole, and in time.

    Counts from the connection on, and later from the first byte of a head: between two requests a connection may be
    quiet for Uvicorn's ``timeout_keep_alive``. What happens behind the head is Guard's to bound.
    """

    head_s = 20.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_s, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE
        if not waiting:
            self._timer.cancel()
        elif self._timer.cancelled():
            self._timer = self.loop.call_later(self.head_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)


class HeadAsGet:
    """ASGI middleware: HEAD is answered as GET is, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, sending)
        finally:
            if "route" in asked:  # the log names it
                scope["route"] = asked["route"]
