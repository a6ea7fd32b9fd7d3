"""Failures as responses: those of routes, by handlers of errors, and those of middlewares, before a body is read.

What nobody expected is answered by logs.RequestLogMiddleware.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
from contextlib import suppress
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from inlay.api.failures import MAX_NAME, BodyError, Failure, failure_of
from inlay.errors import InlayError
from inlay.server.routes import route_of
from inlay.wording import clip

logger = logging.getLogger(__name__)

# Sent again, these would only make the server do the same work for nothing; OpenAI's clients look at the header.
_NOT_AGAIN = frozenset({504, 507})


class JSONBytes(Response):
    """A value of JSON, unchecked: it was made here."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8. Halves of characters, which a request may have held, stay escapes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        errors="backslashreplace"
    )


def failure_response(failure: Failure, path: str) -> Response:
    """An error as a response in the path's dialect, with the headers that say what to do about it."""
    headers = {}
    if failure.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(failure.retry_after_s))
    if failure.status in _NOT_AGAIN:
        headers["X-Should-Retry"] = "false"
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONBytes(route_of(path).dialect.error_body(failure), failure.status, headers)


async def handle_inlay_error(request: Request, error: Exception) -> Response:
    """The handler of InlayError."""
    assert isinstance(error, InlayError)
    return failure_response(failure_of(error), request.scope["path"])


#: What the system refuses to write, and the status of the answer. A client that has left is another OSError.
_REFUSED = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), 507),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO), 500),
}


async def handle_refused_write(request: Request, error: Exception) -> Response:
    """The handler of OSError, for a file that a request would have written. Raises what is none of these."""
    assert isinstance(error, OSError)
    status = _REFUSED.get(error.errno or 0)
    if status is None:
        raise error
    logger.error("a request could not write its file: %s", error)
    reason = (error.strerror or type(error).__name__).lower()
    remedy = "make room there, and send it again" if status == 507 else "its log says where"
    message = f"the server cannot write the file, and has stored nothing ({reason}); {remedy}"
    code = "insufficient_storage" if status == 507 else "storage_failed"
    return failure_response(failure_of(BodyError(message, code=code, status=status)), request.scope["path"])


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """The handler of starlette's own errors: no such route, no such method."""
    assert isinstance(error, HTTPException)
    method, path = clip(request.method, MAX_NAME), clip(request.url.path, MAX_NAME)
    headers = dict(error.headers or {})
    if error.status_code == 405:  # that of the first route with such a path is all that starlette knows of
        headers["Allow"] = ", ".join(_methods(request)) or headers.get("Allow", "GET")
    sentences = {
        404: f"there is nothing at {path!r}; see docs/server.md, or /openapi.json, for what there is",
        405: f"{path!r} does not take {method}; it takes {headers.get('Allow')}",
    }
    message = sentences.get(error.status_code, str(error.detail))
    codes = {404: "not_found", 405: "method_not_allowed"}
    wrong = BodyError(message, code=codes.get(error.status_code), status=error.status_code)
    response = failure_response(failure_of(wrong), request.scope["path"])
    response.headers.update(headers)
    return response


def _methods(request: Request) -> list[str]:
    """What the path of a request takes."""
    routes = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


async def handle_validation_error(request: Request, error: Exception) -> Response:
    """The handler of FastAPI's errors in paths and queries."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"][1:])) or None
    message = f"{name or 'the request'} is wrong: {first['msg']}"
    return failure_response(failure_of(BodyError(message, param=name)), request.scope["path"])


_LINGER_S = 1.0
_LINGER_BYTES = 2**20
_SMALL_BYTES = 2**16


async def refuse(error: BodyError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error while more of the body may come.

    A small body is thrown away, and the connection goes on. Behind any other it is closed; but not at once, which
    would make a client that is still sending lose the answer (TCP resets the connection): a little of what comes is
    thrown away first.
    """
    response = failure_response(failure_of(error), scope["path"])
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
