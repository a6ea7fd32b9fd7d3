"""What is too long for the event loop and is the server's own work: large answers are made, and written, beside it.

A thread of Python holds the interpreter for as long as one call into C takes, and the event loop waits with everybody
else. So large JSON is made of many small pieces, between which the loop gets its turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inlay.server.errors import JSONBytes

T = TypeVar("T")

#: Where JSON is to become larger than this, it is made off the loop. In bytes.
LARGE = 2**16

_WRITTEN_AT_ONCE = 2**18  # bytes; behind each the loop may do something else
_DEPTH = 6  # down to one token's log-probabilities, or one module, of any body that is sent

# Two, so that one large answer does not hold up another; more would only share the same interpreter.
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="inlay-json")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def off_loop(work: Callable[[], T]) -> T:
    """What a function returns, called on a thread that is for nothing else. Raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


async def json_response(
    make: Callable[[], Any], size: int, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON.

    make: gives its value; called on another thread where the response is large.
    size: about how many bytes it will have.
    """
    if size <= LARGE:
        return JSONBytes(make(), status, headers)
    return InPieces(await off_loop(lambda: b"".join(json_pieces(make()))), status, headers)


def json_pieces(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """Compact JSON as ``errors.json_bytes`` writes it, part by part; lists and objects are taken apart to a depth."""
    if depth and isinstance(value, dict) and value:
        for number, (key, member) in enumerate(value.items()):
            yield (("," if number else "{") + _encode(key) + ":").encode(errors="backslashreplace")
            yield from json_pieces(member, depth - 1)
        yield b"}"
    elif depth and isinstance(value, list) and value:
        for number, member in enumerate(value):
            yield b"," if number else b"["
            yield from json_pieces(member, depth - 1)
        yield b"]"
    else:
        yield _encode(value).encode(errors="backslashreplace")


class InPieces(Response):
    """A large body of JSON, handed over to the client's connection as fast as that takes it."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), _WRITTEN_AT_ONCE):
            piece, end = bytes(body[start : start + _WRITTEN_AT_ONCE]), start + _WRITTEN_AT_ONCE
            await send({"type": "http.response.body", "body": piece, "more_body": end < len(body)})
            await asyncio.sleep(0)
