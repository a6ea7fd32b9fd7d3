"""Answers requests while the model loads: the process is alive, the page shows progress, and all else must wait.

It imports nothing slow, so it answers before torch is imported.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.server.page_files import name_of, page_response

if TYPE_CHECKING:
    from fastapi import FastAPI

_RETRY_S = 1
_MESSAGES = "/v1/messages"  # whose clients expect Anthropic's form of errors


@dataclass
class Loading:
    """The progress of loading a model. One thread writes it, others read it.

    Args:
        what: the current step, as in "the server loads …".
        done: finished units of the step.
        total: all units of the step; 0 if they are not counted.
        began: the start, in monotonic seconds.
    """

    what: str = "its libraries"
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.monotonic)

    def report(self, what: str, done: int = 0, total: int = 0) -> None:
        self.what, self.done, self.total = what, done, total

    def __str__(self) -> str:
        counted = f", {self.done:,} of {self.total:,}" if self.total else ""
        seconds = time.monotonic() - self.began
        return f"the server loads {self.what}{counted} ({seconds:.0f} s so far); try again in a moment"


class StartingApp:
    """An ASGI application that is replaced by another one once that is loaded.

    Args:
        load: creates the application on its own thread, and reports its progress.
        root_path: see ServerSettings.
        slow_client_s: see ServerSettings.
        page: see ServerSettings.
    """

    def __init__(
        self,
        load: Callable[[Loading], FastAPI],
        root_path: str = "",
        slow_client_s: float = 30.0,
        *,
        page: bool = False,
    ) -> None:
        self.loading = Loading()
        self.slow_client_s = slow_client_s
        self._load = load
        self._root = root_path
        self._page = page
        self._app: ASGIApp | None = None

    async def loaded(self) -> FastAPI:
        """Load the application and return it. Raises the exception that loading raised.

        The end of the process does not wait for the thread, because a load cannot be interrupted.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[FastAPI] = loop.create_future()

        def run() -> None:
            try:
                app = self._load(self.loading)
            except BaseException as error:
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, app)

        threading.Thread(target=run, name="loader", daemon=True).start()
        return await future

    def become(self, app: ASGIApp) -> None:
        """Let another application answer from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the loaded application is opened by the server
            await _lifespan(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        path = scope["path"].removeprefix(self._root)
        if self._page and scope["method"] in ("GET", "HEAD") and (name := name_of(path)) is not None:
            page = page_response(name, Headers(scope=scope).get("if-none-match"))
            if page is not None:
                return page
        if path == "/health":
            return Response(b'{"status":"alive"}', media_type="application/json")
        message = str(self.loading)
        body: dict[str, Any] = {
            "error": {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
        }
        if path.removeprefix(self._root).startswith(_MESSAGES):
            error = {"type": "overloaded_error", "message": message, "code": "not_ready", "param": None}
            body = {"type": "error", "error": {**error, "details": {"error_code": "not_ready"}}, "request_id": None}
        return Response(json.dumps(body), 503, {"Retry-After": str(_RETRY_S)}, media_type="application/json")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
