"""The formats of log records: text for people, or one JSON object per line for programs.

The message of an exception may quote a prompt. So a record shows the place and type of an exception, and its message
only at level ``debug``.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

from inlay.server.logs import current_line

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
