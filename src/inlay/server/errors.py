"""Turns errors into responses: the error handlers of routes, and refusals by middlewares before a body is read.

logs.RequestLogMiddleware answers unexpected exceptions.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
from contextlib import suppress
from dataclasses import replace
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
from inlay.wording import clip, shown

logger = logging.getLogger(__name__)

# A retry would repeat the same work in vain. OpenAI's clients obey the header.
_NOT_AGAIN = frozenset({504, 507})


class JSONBytes(Response):
    """A JSON response whose value is not checked, because the server made it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(value: Any) -> bytes:
    """Return compact JSON in UTF-8. Lone surrogates, which a request may hold, stay escapes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        errors="backslashreplace"
    )


def failure_response(failure: Failure, scope: Scope) -> Response:
    """Return an error as a response in the path's dialect, with the headers for retries and authentication."""
    failure = replace(failure, request_id=scope.get("state", {}).get("request_id"))
    headers = {}
    if failure.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(failure.retry_after_s))
    if failure.status in _NOT_AGAIN:
        headers["X-Should-Retry"] = "false"
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONBytes(route_of(scope["path"]).dialect.error_body(failure), failure.status, headers)


async def handle_inlay_error(request: Request, error: Exception) -> Response:
    """Handle an InlayError."""
    assert isinstance(error, InlayError)
    return failure_response(failure_of(error), request.scope)


#: Errors of failed writes → the status of the answer. Other OSErrors mean a client that has left.
_REFUSED = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), 507),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO), 500),
}


async def handle_refused_write(request: Request, error: Exception) -> Response:
    """Handle an OSError from writing a request's file. Other OSErrors are raised again."""
    assert isinstance(error, OSError)
    status = _REFUSED.get(error.errno or 0)
    if status is None:
        raise error
    logger.error("a request could not write its file: %s", error)
    reason = (error.strerror or type(error).__name__).lower()
    remedy = "make room there, and send it again" if status == 507 else "its log says where"
    message = f"the server cannot write the file, and has stored nothing ({reason}); {remedy}"
    code = "insufficient_storage" if status == 507 else "storage_failed"
    return failure_response(failure_of(BodyError(message, code=code, status=status)), request.scope)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Handle starlette's own errors: an unknown path or method."""
    assert isinstance(error, HTTPException)
    method, path = clip(request.method, MAX_NAME), clip(request.url.path, MAX_NAME)
    headers = dict(error.headers or {})
    if error.status_code == 405:  # starlette names only the methods of the first matching route
        headers["Allow"] = ", ".join(_methods(request)) or headers.get("Allow", "GET")
    sentences = {
        404: f"there is nothing at {path!r}; see docs/reference/http.md, or /openapi.json, for what there is",
        405: f"{path!r} does not take {method}; it takes {headers.get('Allow')}",
    }
    message = sentences.get(error.status_code, str(error.detail))
    codes = {404: "not_found", 405: "method_not_allowed"}
    wrong = BodyError(message, code=codes.get(error.status_code), status=error.status_code)
    response = failure_response(failure_of(wrong), request.scope)
    response.headers.update(headers)
    return response


def _methods(request: Request) -> list[str]:
    """Return the methods that the path of a request takes."""
    routes = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


async def handle_validation_error(request: Request, error: Exception) -> Response:
    """Handle FastAPI's errors in paths and queries."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"][1:])) or None
    wanted = first["msg"].partition(",")[0].replace("Input should", "it must").replace("String should", "it must")
    message = f"{name or 'the request'} is {shown(first['input'])}; {wanted}"
    return failure_response(failure_of(BodyError(message, param=name)), request.scope)


# Bounds of the rest of a refused body, which is read and dropped.
_LINGER_S = 30.0
_SILENT_S = 1.0
_LINGER_BYTES = 2**25
_LINGER_BYTES_PER_S = 2**14
_SMALL_BYTES = 2**16


async def refuse(error: BodyError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error while more of the body may follow.

    A small body is read and dropped, and the connection stays open. After a larger body the connection is closed. The
    server first drops up to 32 MiB of the body, for at most 30 seconds. It stops when the client is silent for a second
    or sends less than 16 KiB/s. An earlier close would reset the TCP connection, and a client that reads only after its
    whole body would lose the answer.
    """
    response = failure_response(failure_of(error), scope)
    if not has_body(scope) or await _small(scope, receive):
        await response(scope, receive, send)
        return
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await _thrown_away(receive, _LINGER_BYTES)
    await send({"type": "http.response.body", "body": b""})


def has_body(scope: Scope) -> bool:
    """True if the headers announce a body."""
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


async def _small(scope: Scope, receive: Receive) -> bool:
    """Read and drop a small body of known length. Returns False for any other body."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    small = length.isdigit() and len(length) < 10 and int(length) <= _SMALL_BYTES
    return small and await _thrown_away(receive, _SMALL_BYTES)


async def _thrown_away(receive: Receive, most: int) -> bool:
    """Read and drop at most this many bytes of a body. Returns True if the body ended.

    The client must send at ``_LINGER_BYTES_PER_S``, without a pause of ``_SILENT_S``, and for ``_LINGER_S`` at most.
    """
    now = asyncio.get_running_loop().time
    began, dropped = now(), 0
    with suppress(TimeoutError):
        while dropped <= most:
            allowed_s = min(_LINGER_S, _SILENT_S + dropped / _LINGER_BYTES_PER_S)
            async with asyncio.timeout_at(min(now() + _SILENT_S, began + allowed_s)):
                message = await receive()
            dropped += len(message.get("body", b""))
            if not message.get("more_body", False):  # a client that has left sends no more either
                return True
    return False
