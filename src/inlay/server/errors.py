"""What a client did wrong, as an answer in OpenAI's form. Surprises are logs.RequestLog's to answer."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inlay.errors import InlayError
from inlay.openai.failures import BodyError, Failure, cut, failure_of

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


def failure_response(failure: Failure) -> Response:
    """An error as a response, with the headers that say what to do about it."""
    headers = {}
    if failure.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(failure.retry_after_s))
    if failure.status in _NOT_AGAIN:
        headers["X-Should-Retry"] = "false"
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONBytes(failure.body(), failure.status, headers)


async def said_wrong(request: Request, error: Exception) -> Response:
    """The handler of InlayError."""
    assert isinstance(error, InlayError)
    return failure_response(failure_of(error))


async def not_found(request: Request, error: Exception) -> Response:
    """The handler of starlette's own errors: no such route, no such method."""
    assert isinstance(error, HTTPException)
    method, path = cut(request.method), cut(request.url.path)
    sentences = {
        404: f"there is nothing at {path!r}; see docs/server.md, or /openapi.json, for what there is",
        405: f"{path!r} does not take {method}; it takes {(error.headers or {}).get('Allow', 'other methods')}",
    }
    message = sentences.get(error.status_code, str(error.detail))
    codes = {404: "not_found", 405: "method_not_allowed"}
    wrong = BodyError(message, code=codes.get(error.status_code), status=error.status_code)
    response = failure_response(failure_of(wrong))
    response.headers.update(error.headers or {})
    return response


async def not_valid(request: Request, error: Exception) -> Response:
    """The handler of FastAPI's errors in paths and queries."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"][1:])) or None
    message = f"{name or 'the request'} is wrong: {first['msg']}"
    return failure_response(failure_of(BodyError(message, param=name)))
