"""A server's life: it runs until it is told to stop, lets requests under way end, and goes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from inlay.server.heads import PromptHeads
from inlay.server.listen import drop_sleepers
from inlay.server.service import Service

_KEEP_ALIVE_S = 75  # longer than proxies keep idle connections, so that it is they who close them
_LAST_S = 3.0  # behind a second signal: for errors to reach those who are still told
_CLOSING_S = 2  # for connections to close when nothing is under way any more


class Server(uvicorn.Server):
    """Uvicorn; but at the first signal requests under way may go on, and at the second they end.

    ready: called when the model answers.
    """

    def __init__(self, app: FastAPI, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=PromptHeads,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )
        self.fault: Exception | None = None
        self._service: Service = app.state.service
        self._ready = ready
        self._tasks: list[asyncio.Task[None]] = []
        self._signals = 0

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends it. sockets: that listen already. Raises what keeps it from starting."""
        for listener in sockets or ():
            drop_sleepers(listener, self._service.settings.slow_client_s)
        super().run(sockets)
        if self.fault is not None:
            raise self.fault

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await self._service.open()  # before the lifespan does, in which an error could not be told as one sentence
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tasks.append(asyncio.create_task(self._start()))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal; nothing is safe here but to tell the event loop.

        At the second one the process ends in a moment, whatever its threads are doing: what runs outside the
        interpreter cannot be ended, and neither the event loop nor the engine may be waited for.
        """
        self._signals += 1
        if self._signals == 2:
            end = threading.Timer(_LAST_S, _leave)
            end.daemon = True
            end.start()
        self.loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to stop; called once more, stop at once. On the event loop."""
        self._tasks.append(asyncio.create_task(self._stop()))

    async def _start(self) -> None:
        try:
            await self._service.warm_up()
        except Exception as error:  # a server that is never ready is of no use to anybody
            self.fault = error
            self.should_exit = True
        else:
            self._ready()

    async def _stop(self) -> None:
        first = not self._service.flights.stopping
        await self._service.stop()
        if first:
            self.should_exit = True


def _leave() -> None:
    """End the process as the end of its main thread would, without waiting for any other."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
