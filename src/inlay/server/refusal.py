"""How a middleware refuses a request whose body nobody has read: so that the client reads why, and sends no more."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from inlay.openai.failures import BodyError, failure_of
from inlay.server.errors import failure_response

_LINGER_S = 1.0
_LINGER_BYTES = 2**20
_SMALL_BYTES = 2**16


async def refuse(error: BodyError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error while more of the body may come.

    A small body is thrown away, and the connection goes on. Behind any other it is closed; but not at once, which
    would make a client that is still sending lose the answer (TCP resets the connection): a little of what comes is
    thrown away first.
    """
    response = failure_response(failure_of(error))
    if not has_body(scope) or await _small(scope, receive):
        await response(scope, receive, send)
        return
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await _thrown_away(receive, _LINGER_BYTES)
    await send({"type": "http.response.body", "body": b""})


def has_body(scope: Scope) -> bool:
    """Whether a request's headers say that a body follows."""
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


async def _small(scope: Scope, receive: Receive) -> bool:
    """Whether the body has a length, and a small one; it is read then, and nothing more will come."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    small = length.isdigit() and len(length) < 10 and int(length) <= _SMALL_BYTES
    return small and await _thrown_away(receive, _SMALL_BYTES)


async def _thrown_away(receive: Receive, most: int) -> bool:
    """Read so much of a body, for a while, and forget it; returns whether that was its end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while most >= 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):  # neither is there any where the client has left
                    return True
    return False
