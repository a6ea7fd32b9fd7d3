"""Reads logs of requests from JSON lines, with one prompt in each line, in common forms."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from inlay.errors import InlayError, Place
from inlay.pml.nodes import ROLES

Progress = Callable[[int, int], None]

MAX_LINE_BYTES = 64 * 2**20

_TOOLS = ("tool", "function")  # the role of tool results, in OpenAI's newer and older name
#: Role in a log → role in PML. OpenAI now calls the system role developer. Tool results stand between assistant turns,
#: so they become user turns.
_ROLES = {**{role: role for role in ROLES}, "developer": "system", **dict.fromkeys(_TOOLS, "user")}
_FORMS = '{"prompt": "…"}, {"messages": […]}, an OpenAI Batch request, or a string'
_GZIP = b"\x1f\x8b"


class LogError(InlayError):
    """A log cannot be read, or one of its lines is not a request."""


class _BadLineError(Exception):
    """A line is wrong. The message gives the fault and the remedy."""


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """One message, or a whole prompt without turns (role None).

    Attributes:
        tool: True if it is the result of a tool.
        marks: The characters (start, stop) of each part with ``cache_control``, in order and disjoint.
    """

    role: str | None
    text: str
    tool: bool = False
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """One request of a log. ``line`` is its line, from 1."""

    line: int
    turns: tuple[LoggedTurn, ...]


class LogReader:
    """Reads a log line by line. Iterating raises LogError at the first bad line, or counts and skips it.

    Args:
        path: A file, which may be compressed with gzip, or "-" for standard input.
        skip_bad: Skip bad lines instead of raising LogError.
        progress: Called with the bytes read and the size of the file.

    Attributes:
        skipped: Number of skipped lines.
        first_skipped: The error of the first skipped line.
        tool_turns: Number of tool results that were read as user turns.
    """

    def __init__(self, path: str | os.PathLike[str], *, skip_bad: bool = False, progress: Progress | None = None):
        self.source = "<stdin>" if os.fspath(path) == "-" else os.fsdecode(path)
        self.skipped = 0
        self.first_skipped: str | None = None
        self.tool_turns = 0
        self._path = os.fspath(path)
        self._skip_bad = skip_bad
        self._progress = progress

    def check(self) -> None:
        """Raise LogError if the file cannot be opened. Call it before long work."""
        if self._path != "-" and not Path(self._path).is_fifo():  # a pipe can be opened only once
            with _opened(self._path, self.source, None):
                pass

    def __iter__(self) -> Iterator[LoggedPrompt]:
        with _opened(self._path, self.source, self._progress) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    turns = _turns(line, first=number == 1)
                except _BadLineError as error:
                    self._bad(Place(self.source, number), str(error))
                else:
                    if turns is not None:
                        self.tool_turns += sum(turn.tool for turn in turns)
                        yield LoggedPrompt(number, turns)

    def _bad(self, place: Place, message: str) -> None:
        if not self._skip_bad:
            raise LogError(f"{place}: {message}", code="prompt.invalid_log_line")
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"{place}: {message}"


@contextmanager
def _opened(path: str, source: str, progress: Progress | None) -> Iterator[Iterator[bytes]]:
    """Open the file and yield its lines, each cut after ``MAX_LINE_BYTES`` + 1 bytes. Errors raise LogError."""
    try:
        with _stream(path) as raw:
            size = os.fstat(raw.fileno()).st_size if path != "-" else 0
            packed = raw.peek(2)[:2] == _GZIP
            yield _lines(gzip.GzipFile(fileobj=raw) if packed else raw, raw, size, progress)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise LogError(
            f"{source}: cannot be decompressed ({error}); compress it again", code="prompt.unreadable_log"
        ) from None
    except FileNotFoundError:
        raise LogError(f"{source}: no such file; check the path", code="prompt.unreadable_log") from None
    except OSError as error:
        raise LogError(
            f"{source}: cannot be read ({error.strerror or error}); check the path", code="prompt.unreadable_log"
        ) from None


@contextmanager
def _stream(path: str) -> Iterator[io.BufferedReader]:
    if path == "-":
        yield cast(io.BufferedReader, sys.stdin.buffer)
    else:
        with open(path, "rb") as file:
            yield file


def _lines(file: io.BufferedIOBase, raw: io.BufferedReader, size: int, progress: Progress | None) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)
        if progress is not None and size:
            progress(raw.tell(), size)


def _turns(line: bytes, *, first: bool) -> tuple[LoggedTurn, ...] | None:
    """Return the turns of a line, or None for a blank one."""
    if len(line) > MAX_LINE_BYTES:
        raise _BadLineError(f"the line is longer than {MAX_LINE_BYTES:,} bytes; leave it out")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise _BadLineError(f"byte {error.start + 1} of the line is not UTF-8; save the log as UTF-8") from None
    if not text.strip():
        return None
    try:
        value = json.loads(text)
    except RecursionError:
        raise _BadLineError(f"the JSON is nested too deeply; write {_FORMS}") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise _BadLineError(f"this is not JSON ({reason}); write {_FORMS}, on one line") from None
    return _request(value)


def _request(value: Any) -> tuple[LoggedTurn, ...]:
    if isinstance(value, dict) and isinstance(value.get("body"), dict):  # OpenAI Batch
        value = value["body"]
    if isinstance(value, str):
        return (LoggedTurn(None, _text(value, "the prompt")),)
    if not isinstance(value, dict):
        raise _BadLineError(f"the line is {_kind(value)}; write {_FORMS}")
    if "messages" in value and "prompt" in value:
        raise _BadLineError("the line has both a prompt and messages; keep one of them")
    if "messages" in value:
        return _messages(value["messages"])
    if "prompt" in value:
        return (LoggedTurn(None, _text(value["prompt"], "the prompt")),)
    raise _BadLineError(f"the line has neither a prompt nor messages; write {_FORMS}")


def _messages(messages: Any) -> tuple[LoggedTurn, ...]:
    if not isinstance(messages, list) or not messages:
        raise _BadLineError('messages is no list of messages; write [{"role": "user", "content": "…"}]')
    return tuple(_message(message, number) for number, message in enumerate(messages, start=1))


def _message(message: Any, number: int) -> LoggedTurn:
    what = f"message {number}"
    if not isinstance(message, dict):
        raise _BadLineError(f'{what} is {_kind(message)}; write {{"role": "user", "content": "…"}}')
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _BadLineError(f"{what} has the role {_clipped(role)}, for which PML has no turn; use {', '.join(_ROLES)}")
    content = message.get("content")
    # the message is a tool call without content
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        content = ""
    if not isinstance(content, list):
        text = _text(content, f"the content of {what}")
        whole = ((0, len(text)),) if text and _is_marked(message) else ()
        return LoggedTurn(_ROLES[role], text, role in _TOOLS, whole)
    texts = [_part(part, what) for part in content]
    ends = list(accumulate(map(len, texts)))
    marked = [_is_marked(part) for part in content]
    if texts and _is_marked(message):  # which marks its last part
        marked[-1] = True
    marks = tuple(
        (end - len(text), end) for text, end, is_marked in zip(texts, ends, marked, strict=True) if is_marked and text
    )
    return LoggedTurn(_ROLES[role], "".join(texts), role in _TOOLS, marks)


def _is_marked(value: dict[str, Any]) -> bool:
    """Return True if a part or message has a cache mark of Anthropic's or OpenAI's, which makes it a module."""
    return bool(value.get("cache_control") or value.get("prompt_cache_breakpoint"))


def _part(part: Any, what: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise _BadLineError(f'{what} holds a part of type {_clipped(kind)}; keep parts of type "text" alone')
    return _text(part.get("text"), f"a part of {what}")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _BadLineError(f"{what} is {_kind(value)}; write a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"half a character (\\u{ord(value[error.start]):04x}) at index {error.start}"
        raise _BadLineError(f"{what} holds {half}; cut texts between characters") from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "a string")


def _clipped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]
