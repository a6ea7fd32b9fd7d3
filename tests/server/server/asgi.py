"""One request through an ASGI application in this process, event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Exchange:
    """The calls that an application made for a request. taken: how many pieces of the body it read."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    taken: int = 0

    @property
    def error(self) -> dict[str, Any]:
        """The error that it answered with, which has the form of OpenAI's and says something."""
        assert self.headers["content-type"] == "application/json"
        assert int(self.headers["content-length"]) == len(self.body)
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return error


def send(
    app: ASGIApp,
    pieces: Iterable[bytes] = (),
    *,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    state: Mapping[str, Any] | None = None,
    cut: bool = False,
    pause_s: float = 0.0,
) -> Exchange:
    """Send a request, its body in pieces. cut: whether the client leaves before the end. pause_s: before each piece."""
    named = headers.items() if isinstance(headers, Mapping) else headers
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in named],
        "state": dict(state or {}),
    }
    found = Exchange()

    coming = iter(pieces)
    following = next(coming, None)

    async def receive() -> Message:
        nonlocal following
        if following is None:
            return {"type": "http.disconnect"}
        await asyncio.sleep(pause_s)
        piece, following = following, next(coming, None)
        found.taken += 1
        return {"type": "http.request", "body": piece, "more_body": cut or following is not None}

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert found.status is None, "one response a request"
            found.status = message["status"]
            found.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            found.body += message.get("body", b"")

    asyncio.run(_run(app(scope, receive, sending)))
    return found


async def _run(application: Awaitable[None]) -> None:
    await application


class Echo:
    """An application that answers with nothing, and keeps the state that it was given."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.states.append(scope["state"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
