"""Log records: one line for each request, with its id on every record made for it, as text or as JSON.

A line has the tenant, the path, the time and the tokens of a request. It never has a prompt, an answer, a key or a
header. Routes add their values to ``current_line()``; ``metrics.RequestObserver`` does so for completions.

The message of an exception may quote a prompt. So a record shows the place and type of an exception, and its message
only at level ``debug``.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inlay.api.failures import INTERNAL_ERROR
from inlay.server.errors import failure_response

logger = logging.getLogger(__name__)
access = logging.getLogger("inlay.access")

REQUEST_ID = b"x-request-id"
ANTHROPIC_ID = b"request-id"
"""The header in which Anthropic's clients look for the same id."""
UNKNOWN = "unknown"

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SANE_CODE = re.compile(r"[a-z0-9_]{1,64}")
_PATH_CHARACTERS = 200
_METHOD_CHARACTERS = 16
_ERROR_BYTES = 65_536  # of an error's body; the server's own errors are short, and others are not parsed
_CLIENT_LEFT = 499  # nginx's status for a client that left before its answer

_LINE: ContextVar[Line | None] = ContextVar("inlay_request", default=None)


def current_line() -> Line | None:
    """Return the line of the current request, to add values to it; None outside of requests."""
    return _LINE.get()


@dataclass(slots=True)
class Line:
    """The values of one request's log line. None means absent or unknown.

    Args:
        request_id: the request's id.
        method: the HTTP method.
        path: the path of the request.
        endpoint: the path of the route, like "/v1/schemas/{name}"; "unknown" without a route.
        tenant: the tenant's name.
        status: the HTTP status.
        seconds: from the request's arrival to the end of its response.
        ttft_s: seconds to its first token.
        prompt_tokens: of all its prompts.
        cached_tokens: prompt tokens from the cache.
        module_tokens: prompt tokens from modules.
        generated_tokens: of all its answers.
        finish_reasons: of its answers, in order, once they are complete.
        disconnected: the client left before the answer was complete.
        error: the code of the error that replaced the answer or ended its stream.
    """

    request_id: str
    method: str
    path: str
    endpoint: str = UNKNOWN
    tenant: str | None = None
    status: int | None = None
    seconds: float = 0.0
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    module_tokens: int | None = None
    generated_tokens: int | None = None
    finish_reasons: tuple[str, ...] | None = None
    disconnected: bool = False
    error: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a log record, with times to the microsecond."""
        told = {"tenant": None, **asdict(self), "seconds": round(self.seconds, 6)}
        del told["request_id"], told["endpoint"]
        if self.ttft_s is not None:
            told["ttft_s"] = round(self.ttft_s, 6)
        if self.finish_reasons is not None:
            told["finish_reasons"] = list(self.finish_reasons)
        return told


class LogCounter(Protocol):
    """Counts requests; see ``metrics.Metrics``."""

    def http_began(self) -> None:
        """Count a request that has arrived."""

    def http_ended(self, line: Line) -> None:
        """Count a request that was answered, or whose client has left."""


class RequestLogMiddleware:
    """The outermost middleware: gives every request an id, and writes one log line at its end.

    The id is the request's own ``X-Request-Id`` if it is well-formed, else a new one. The response and
    ``scope["state"]["request_id"]`` have it, and every log record of the request.

    An unhandled exception is logged and answered with INTERNAL_ERROR, which does not describe it. After the first byte
    of a response, it is raised to the HTTP server.
    """

    def __init__(self, app: ASGIApp, counts: LogCounter) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = quote(scope["path"], safe="/:@!$&'()*+,;=~")
        line = Line(_request_id(scope), scope["method"][:_METHOD_CHARACTERS], path[:_PATH_CHARACTERS])
        scope.setdefault("state", {})["request_id"] = line.request_id
        token = _LINE.set(line)
        began = time.perf_counter()
        self._counts.http_began()
        exchange = _Exchange(line, receive, send)
        try:
            await self._answer(scope, exchange)
        finally:
            line.seconds = time.perf_counter() - began
            exchange.close(scope)
            self._counts.http_ended(line)
            level = logging.ERROR if line.status is not None and line.status >= 500 else logging.INFO
            access.log(level, "%s %s %s", line.method, line.path, line.status, extra={"fields": line.fields()})
        _LINE.reset(token)  # not after an exception, because the HTTP server's record of it needs the id

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            if exchange.left and isinstance(error, OSError):
                return  # the HTTP server raises OSError if the client has left
            exchange.line.error = INTERNAL_ERROR.code
            if exchange.line.status is not None:
                raise  # the HTTP server logs it and closes the connection
            logger.exception("an unexpected exception ended a request")
            await failure_response(INTERNAL_ERROR, scope)(scope, exchange.receive, exchange.send)


class _Exchange:
    """The messages between server and application for one request. It notes their values in the line."""

    def __init__(self, line: Line, receive: Receive, send: Send) -> None:
        self.line = line
        self.left = False  # True if the client left before the response was complete
        self._receive = receive
        self._send = send
        self._complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self.left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.line.status = message["status"]
            named = [(name, self.line.request_id.encode()) for name in (REQUEST_ID, ANTHROPIC_ID)]
            others = [header for header in message.get("headers", ()) if header[0].lower() != REQUEST_ID]
            message = {**message, "headers": [*others, *named]}
        elif message["type"] == "http.response.body":
            if (self.line.status or 0) >= 400 and self.line.error is None:
                self.line.error = _error_code(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        try:
            await self._send(message)
        except OSError:
            self.left = True
            raise

    def close(self, scope: Scope) -> None:
        """Complete the line at the end. A client that has its whole answer does not count as disconnected."""
        line = self.line
        line.disconnected = line.disconnected or (self.left and line.finish_reasons is None)
        if line.status is None and line.disconnected:
            line.status = _CLIENT_LEFT
        line.tenant = getattr(scope["state"].get("tenant"), "name", None)
        line.endpoint = getattr(scope.get("route"), "path", UNKNOWN)


def _request_id(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == REQUEST_ID]
    if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
        return str(given[0].decode())
    return f"req-{secrets.token_hex(16)}"


def _error_code(body: bytes) -> str | None:
    """Return the code of the error in a body, else its type, in any dialect; None for other bodies."""
    if not 0 < len(body) <= _ERROR_BYTES:
        return None
    try:
        error = json.loads(body)["error"]
        code = error.get("code") or error["type"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return code if isinstance(code, str) and _SANE_CODE.fullmatch(code) else None


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127)}  # so that no message can start a new line


def configure(*, format: str, level: str, stream: TextIO | None = None) -> None:
    """Write the log to a stream, by default stderr. It replaces earlier log handlers.

    The level applies to inlay's and the HTTP server's records. Other libraries log from ``warning``. Start the HTTP
    server with ``log_config=None, access_log=False``: its records come here, and each request already has a line.

    Args:
        format: as in ServerSettings, which checks it.
        level: as in ServerSettings.
        stream: the output.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JSONFormatter if format == "json" else TextFormatter
    handler.setFormatter(formatter(tell=number <= logging.DEBUG))
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    for name in ("inlay", "uvicorn"):
        logging.getLogger(name).setLevel(number)


class _Formatter(logging.Formatter):
    """Base of the formats. ``tell`` includes the messages of exceptions."""

    def __init__(self, *, tell: bool) -> None:
        super().__init__()
        self._tell = tell

    def _exception(self, record: logging.LogRecord) -> str | None:
        if not record.exc_info or record.exc_info[1] is None:
            return None
        return "".join(_trace(record.exc_info[1], self._tell)).rstrip("\n")


class JSONFormatter(_Formatter):
    """One JSON object per line: time, level, logger, message, request_id, then the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = current_line()
        said: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().strip(),
            "request_id": None if line is None else line.request_id,
            **getattr(record, "fields", {}),
        }
        trace = self._exception(record)
        return json.dumps(said if trace is None else {**said, "exception": trace})


class TextFormatter(_Formatter):
    """One line per record: time, level, request id, message, then the fields that have a value."""

    def format(self, record: logging.LogRecord) -> str:
        line = current_line()
        named = "" if line is None else f" [{line.request_id}]"
        message = record.getMessage().strip().translate(_CONTROL)
        fields = "".join(f" {key}={_written(value)}" for key, value in _telling(getattr(record, "fields", {})))
        text = f"{_time(record)} {record.levelname.lower()}{named} {message}{fields}"
        trace = self._exception(record)
        return text if trace is None else f"{text}\n{trace}"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _telling(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that the message does not already contain."""
    said = ("method", "path", "status")
    return (
        (key, value) for key, value in fields.items() if key not in said and value is not None and value is not False
    )


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _trace(error: BaseException, tell: bool) -> Iterator[str]:
    """Yield an exception in about Python's format, after the exceptions that caused it."""
    for number, each in enumerate(reversed(_chain(error))):
        if number:
            yield "and then:\n"
        yield from traceback.format_tb(each.__traceback__)
        kind = type(each)
        yield f"{kind.__module__}.{kind.__qualname__}" + (f": {each}\n" if tell else "\n")
        if isinstance(each, BaseExceptionGroup):
            for member in each.exceptions:
                yield from _trace(member, tell)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception, its cause, and so on."""
    chain = [error]
    while (earlier := chain[-1].__cause__ or _context(chain[-1])) is not None and earlier not in chain:
        chain.append(earlier)
    return chain


def _context(error: BaseException) -> BaseException | None:
    return None if error.__suppress_context__ else error.__context__
