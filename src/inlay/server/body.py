"""Reads and parses request bodies, in one pass and bounded time.

A middleware reads each body once, within limits of size and time, before any route sees it. An invalid body is refused
with a sentence that says why. ``Connection`` is one client during its answer, with the server-sent events on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inlay.api.failures import BodyError, failure_of
from inlay.server.errors import failure_response, has_body, refuse
from inlay.server.limits import EVERYBODY, Tenant
from inlay.server.routes import route_of
from inlay.server.threads import BodyWorkers
from inlay.strict_json import JSONError, JsonFault, decode, read_json
from inlay.wording import clip

logger = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client has left."""


class Connection:
    """A context that ends its task with ClientGoneError if the client disconnects, or leaves sent data unread.

    If a client reads slowly, ``send`` waits. The engine continues meanwhile, and only its latest output is kept.

    Args:
        scope: the ASGI scope.
        receive: ASGI's receive, after the request's body.
        send: ASGI's send.
        slow_s: seconds that a client may leave data unread.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, slow_s: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._slow_s = slow_s
        self._sending_since: float | None = None
        self._complete = False
        self._gone = False

    async def __aenter__(self) -> Connection:
        task = asyncio.current_task()
        assert task is not None, "an ASGI application runs in a task"
        self._task = task
        self._cancelled = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._listener = self._loop.create_task(self._listen())
        self._timer = self._loop.call_later(self._slow_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._complete = True
        self._listener.cancel()
        self._timer.cancel()
        if self._gone and self._task.uncancel() <= self._cancelled and kind is asyncio.CancelledError:
            raise ClientGoneError from error

    @property
    def request_id(self) -> str | None:
        """The id of the request, as its X-Request-Id says."""
        found: str | None = self._scope.get("state", {}).get("request_id")
        return found

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True  # after the last byte, servers report a disconnect too
        self._sending_since = self._loop.time()
        await self._send(message)
        self._sending_since = None

    async def respond(self, response: Response) -> None:
        """Send a complete response."""
        await response(self._scope, self._receive, self.send)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _look(self) -> None:
        """Check repeatedly whether sent data has been unread for too long."""
        left = self._slow_s
        if self._sending_since is not None:
            left -= self._loop.time() - self._sending_since
        if left <= 0:
            logger.warning("the client has read nothing for %g seconds; its request is aborted", self._slow_s)
            self._leave()
        else:
            self._timer = self._loop.call_later(left, self._look)

    def _leave(self) -> None:
        if not self._complete and not self._gone:
            self._gone = True
            self._task.cancel()


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise buffer events
]


class EventStream:
    """The events of one response. The first event starts it, so earlier failures can have their own status.

    Args:
        send: ASGI's send.
        keep_alive_s: seconds of silence under ``kept_alive`` until a comment is sent. The comment also starts the
            response. Clients skip it, and proxies do not close the connection.
        headers: further headers of the response.
    """

    def __init__(self, send: Send, keep_alive_s: float, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._send = send
        self._headers = [*_HEADERS, *((name.lower().encode(), value.encode()) for name, value in headers.items())]
        self._keep_alive_s = keep_alive_s
        self._writing = asyncio.Lock()
        self._written_at = asyncio.get_running_loop().time()
        self.begun = False

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send comments during silence, until the end of the block."""
        comments = asyncio.create_task(self._comment())
        try:
            yield
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)  # the next write meets the same exception

    async def _comment(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            left = self._written_at + self._keep_alive_s - clock()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._write(b": keep-alive\n\n", more=True)

    async def write(self, events: Iterable[str]) -> None:
        """Send some events together."""
        text = "".join(events)
        if text:
            await self._write(text.encode(errors="backslashreplace"), more=True)

    async def end(self, events: Iterable[str]) -> None:
        """Send the last events and end the response."""
        *before, last = events
        await self.write(before)
        await self._write(last.encode(errors="backslashreplace"), more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        async with self._writing:
            if not self.begun:
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                self.begun = True  # set only now, because a comment may be cancelled during the send
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            self._written_at = asyncio.get_running_loop().time()


MAX_CONTAINERS = 100_000  # lists and objects; PML has the same limit of elements
MAX_FIELDS = 100_000  # of all objects together
MAX_VALUES = 2**20  # token ids of a prompt count

_TOO_MANY = {JsonFault.SIZE: "lists and objects", JsonFault.FIELDS: "fields", JsonFault.VALUES: "values"}


def parse_json(data: bytes | bytearray, max_nesting: int) -> Any:
    """Return the value of a JSON body, None for an empty body. Raises BodyError."""
    if not data or data.isspace():
        return None
    try:
        return read_json(
            data,
            max_depth=max_nesting,
            max_containers=MAX_CONTAINERS,
            max_fields=MAX_FIELDS,
            max_values=MAX_VALUES,
        )
    except JSONError as error:
        raise _wrong(error) from None


def decoded(data: bytes | bytearray) -> str:
    """Return a body as text. Raises BodyError if it is not UTF-8."""
    try:
        return decode(data)
    except JSONError as error:
        raise _wrong(error) from None


def _wrong(error: JSONError) -> BodyError:
    return BodyError(f"the body {_sentence(error)}", code="invalid_json")


def _sentence(error: JSONError) -> str:
    match error.fault:
        case JsonFault.ENCODING:
            return f"is not UTF-8 from byte {(error.index or 0) + 1:,} on; encode it as UTF-8"
        case JsonFault.SYNTAX:
            return f"is not JSON ({error.detail} at line {error.line}, column {error.column}); correct it"
        case JsonFault.CONSTANT:
            return f"holds {error.detail}, which is not a JSON value; write a number, or leave it out"
        case JsonFault.TWICE:
            return f"gives {json.dumps(clip(error.detail))} twice in one object; keep one of them"
        case JsonFault.HALF:
            return "holds half a character (a lone surrogate); cut texts between characters"
        case JsonFault.NUMBER:
            return "holds a number of more than 4,300 digits; write a smaller one"
        case JsonFault.DEPTH:
            deep = "too deeply" if error.bound is None else f"more than {error.bound} deep"
            return f"nests lists and objects {deep}; nest them less deeply"
    return f"holds more than {error.bound:,} {_TOO_MANY[error.fault]}; send several requests"


_JSON = "application/json"
_XML = frozenset({"application/xml", "text/xml"})
_NO_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
_BODIES_AT_ONCE = 16  # bodies of the largest size
_BUSY_RETRY_S = 1.0
_MIB = 2**20


class BodyMiddleware:
    """ASGI middleware: parses the body of a request into ``scope["state"]["body"]``, or refuses the request.

    A JSON body becomes its value. An XML body, on routes that take XML, becomes its text. No body becomes None. The
    size in bytes is in ``scope["state"]["body_bytes"]``. The raw bytes are dropped, and ``receive`` continues after
    them. The middleware keeps no reference to the value, so a route that pops it from the state holds the only one.
    Place it inside AuthMiddleware, so that bodies without a valid key are not read.

    It refuses with status 400, 408 (too slow), 413 (too large), 415 (wrong type), and 429 for too many large bodies at
    once. It refuses types that web pages may send across origins without a preflight request (text/plain, forms).
    Otherwise a page could write to a server without keys through its visitor's browser.

    Args:
        app: the next ASGI application.
        max_body_bytes: of one body. All bodies that one tenant sends at the same time may have 16 times as much.
        max_nesting: the most levels of lists and objects.
        workers: parse large bodies; None creates new workers.
        slow_s: seconds that every body may take to arrive.
        slow_bytes_per_s: a larger body may take longer, at this rate.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int = 8 * _MIB,
        max_nesting: int = 64,
        workers: BodyWorkers | None = None,
        slow_s: float = 30.0,
        slow_bytes_per_s: float = _MIB / 64,
    ) -> None:
        self._app = app
        self._max_bytes = max_body_bytes
        self._max_nesting = max_nesting
        self._workers = workers or BodyWorkers(_BODIES_AT_ONCE * max_body_bytes)
        self._slow_s = slow_s
        self._slow_bytes_per_s = slow_bytes_per_s
        self._held: Counter[str] = Counter()  # by tenant: bytes of bodies that are still arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_of(scope["path"]).takes_file:
            await self._app(scope, receive, send)
            return
        try:
            data = await self._data(scope, receive) if has_body(scope) else None
        except BodyError as error:
            await refuse(error, scope, receive, send)
            return
        except ClientDisconnect:
            return
        state = scope.setdefault("state", {})
        state["arrival"] = time.perf_counter()  # deadlines count from here
        try:
            state.update(body=None if data is None else await self._parsed(data, scope), body_bytes=len(data or b""))
        except BodyError as error:
            await failure_response(failure_of(error), scope)(scope, receive, send)
            return
        del data  # frees the raw bytes while the request is answered
        await self._app(scope, receive, send)

    async def _data(self, scope: Scope, receive: Receive) -> bytearray:
        """Return the bytes of a body. Raises BodyError while more bytes may follow, and ClientDisconnect."""
        self._check_headers(scope)
        return await self._read(receive, _tenant(scope))

    async def _parsed(self, data: bytearray, scope: Scope) -> Any:
        if _kind(scope) != _JSON:
            return decoded(data)
        work = partial(parse_json, data, self._max_nesting)
        return await self._workers.run(work, tenant=_tenant(scope), size=len(data))

    def _check_headers(self, scope: Scope) -> None:
        """Raise BodyError if the headers show that the body cannot be accepted."""
        method, headers = scope["method"], Headers(scope=scope)
        if method in _NO_BODY:
            raise BodyError(f"{method} takes no body; leave it out", code="unexpected_body")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise _other_type("the body is compressed; send it as it is, without Content-Encoding")
        charset = headers.get("content-type", "").lower().partition("charset=")[2].partition(";")[0].strip(' "')
        if charset not in ("", "utf-8", "utf8"):
            raise _other_type(f"the body is in {charset!r:.40}; encode it as UTF-8")
        kind = _kind(scope)
        if kind != _JSON and not (kind in _XML and route_of(scope["path"]).takes_xml):
            said = f"Content-Type is {kind!r:.60}" if kind else "there is no Content-Type"
            raise _other_type(f"{said}; send JSON with 'Content-Type: {_JSON}'")

    async def _read(self, receive: Receive, tenant: str) -> bytearray:
        """Return the bytes of a body within the limits. Raises BodyError and ClientDisconnect."""
        data = bytearray()
        try:
            async with asyncio.timeout(self._slow_s) as timeout:
                began = asyncio.get_running_loop().time()
                while True:
                    message = await receive()
                    if self._take(message, data, tenant):
                        return data
                    timeout.reschedule(began + self._slow_s + len(data) / self._slow_bytes_per_s)
        except TimeoutError:
            sentence = f"the body came too slowly, {len(data):,} bytes so far; send it faster, or send less"
            raise BodyError(sentence, code="request_timeout", status=408) from None
        finally:
            self._held[tenant] -= len(data)

    def _take(self, message: Message, data: bytearray, tenant: str) -> bool:
        """Append a piece of a body to ``data``, and count it for the tenant. Returns True if it was the last piece.

        Raises:
            BodyError: the body, or all bodies of the tenant that are arriving, are too large.
            ClientDisconnect: the client has left.
        """
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        if len(data) + len(piece) > self._max_bytes:
            raise self._too_large()
        if self._held[tenant] + len(piece) > _BODIES_AT_ONCE * self._max_bytes:
            raise BodyError(
                "you are sending too many large bodies at the same time; wait for one to end",
                code="too_many_bodies",
                status=429,
                retry_after_s=_BUSY_RETRY_S,
            )
        data += piece
        self._held[tenant] += len(piece)
        return not message.get("more_body", False)

    def _too_large(self) -> BodyError:
        return BodyError(
            f"the body has more than {self._max_bytes:,} bytes; send less, or several requests",
            code="body_too_large",
            status=413,
        )


def _tenant(scope: Scope) -> str:
    """The tenant's name."""
    tenant: Tenant = scope.get("state", {}).get("tenant", EVERYBODY)
    return tenant.name


def _kind(scope: Scope) -> str:
    """The Content-Type of a request, without its parameters."""
    return Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()


def _other_type(message: str) -> BodyError:
    return BodyError(message, code="unsupported_media_type", status=415)
