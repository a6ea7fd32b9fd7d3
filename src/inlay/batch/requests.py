"""The requests of a batch's input: parsing, location in the file, and order.

A line is ``{"custom_id": …, "method": "POST", "url": …, "body": …}``. Only the places of lines are kept, in a temporary
SQLite database without a name, so the input may be larger than memory. The database ends with the process and keeps a
bounded part in memory. A request takes about 30 bytes and twice its custom_id there (58 bytes, measured, with ids of
14). While it waits, it takes about 5 more for every token of its prompt. SQLITE_TMPDIR sets the folder.

Requests that share the longest prefix run together. A request's key is its prompt as token ids, most significant byte
first. So sorted keys follow a walk through the prefix tree (ChunkAttention, arXiv 2402.15220, section 3.1), and a
prefix is in the pool once, however small the pool is. Prompts of one schema under one policy are neighbours.
``BatchCounts`` counts the progress of a batch.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from inlay.api.call import Call
from inlay.api.dialect import DIALECTS
from inlay.client.async_llm import AsyncLLM
from inlay.errors import InlayError, ParameterError
from inlay.pml import Prompt
from inlay.strict_json import JSONError, JsonFault, read_json
from inlay.types import RequestOutput
from inlay.wording import shown

MAX_LINE_BYTES = 64 * 2**20
_KEYS = ("custom_id", "method", "url", "body")
_EXAMPLE = '{"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'


class LineError(InlayError):
    """A line is no request. ``custom_id`` is None if the line has none."""

    def __init__(self, message: str, custom_id: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A parsed line of the input. The body is not validated yet."""

    custom_id: str
    endpoint: str
    body: Any


def parse_line(data: bytes, *, first: bool = False) -> BatchLine:
    """Parse a line of the input. The ``first`` one may begin with a byte order mark. Raises LineError."""
    value = _json(data, first)
    if not isinstance(value, Mapping):
        raise LineError(f"this is {shown(value)}; write {_EXAMPLE}", code="batch.invalid_line")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        what = f"custom_id is {shown(custom_id)}" if "custom_id" in value else "there is no custom_id"
        raise LineError(f"{what}; write a text that no other line has", code="batch.invalid_line")
    problem = _problem(value)
    if problem:
        raise LineError(problem, custom_id, code="batch.invalid_line")
    return BatchLine(custom_id, value["url"], value["body"])


def _json(data: bytes, first: bool) -> Any:
    if len(data) > MAX_LINE_BYTES:
        raise LineError(
            f"the line is longer than {MAX_LINE_BYTES:,} bytes; split it into several requests",
            code="batch.line_too_long",
        )
    try:
        return read_json(data.removeprefix(BOM_UTF8) if first else data)
    except JSONError as error:
        raise LineError(_sentence(error), code="batch.invalid_line") from None


def _sentence(error: JSONError) -> str:
    match error.fault:
        case JsonFault.ENCODING:
            return f"byte {(error.index or 0) + 1} of the line is not UTF-8; save the file as UTF-8"
        case JsonFault.HALF:
            return "a text holds half a character (a lone surrogate); cut texts between characters"
        case JsonFault.TWICE:
            return f"the line gives {shown(error.detail)} twice in one object; keep one of them"
        case JsonFault.DEPTH:
            return "the JSON is nested too deeply; nest it less"
        case JsonFault.CONSTANT:
            reason = f"{error.detail} is no value of JSON"
        case JsonFault.NUMBER:
            reason = "a number of more than 4,300 digits"
        case _:
            reason = f"{error.detail} at column {error.column}"
    return f"this is not JSON ({reason}); write {_EXAMPLE} on one line"


def _problem(line: Mapping[str, Any]) -> str | None:
    """Return the problem of a line with a custom_id, or None."""
    for name in line:
        if name not in _KEYS:
            return f"a line has no field {shown(name)}; its fields are {', '.join(_KEYS)}"
    for name in _KEYS:
        if name not in line:
            return f"there is no {name}; write {_EXAMPLE}"
    if line["method"] != "POST":
        return f'method is {shown(line["method"])}; write "POST"'
    paths = [route.path for dialect in DIALECTS for route in dialect.routes]
    if line["url"] not in paths:
        return f"url is {shown(line['url'])}; inlay answers {' and '.join(paths)}"
    return None


_CACHE_KIB = 32 * 1024
_REPORT_EVERY = 1024  # lines
_TABLES = """
    CREATE TABLE requests (
        line INTEGER PRIMARY KEY, offset INTEGER NOT NULL, size INTEGER NOT NULL,
        custom_id TEXT UNIQUE, problem TEXT, done INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE keys (line INTEGER PRIMARY KEY, key BLOB NOT NULL);
"""


class Entry(NamedTuple):
    """A line: its number from 1, its place and size in bytes, and its problem if it is no request."""

    line: int
    offset: int
    size: int
    custom_id: str | None
    problem: str | None


class Index:
    """The requests of one input file. Use it as a context manager.

    Attributes:
        sha256: of the whole file.
        requests: the number of lines that are not blank.

    Raises:
        ParameterError: if the file cannot be read, or two requests have one custom_id.
    """

    def __init__(self, path: Path, progress: Progress) -> None:
        self.path = path
        self.requests = 0
        self._file = _opened(path)
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.executescript(f"PRAGMA journal_mode=OFF; PRAGMA cache_size=-{_CACHE_KIB}; {_TABLES} BEGIN")
        try:
            self.sha256 = self._scan(progress)
        except OSError as error:
            raise _unreadable(path, error) from None

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._base.close()
        self._file.close()

    def mark_done(self, line: int, custom_id: str | None) -> bool:
        """Mark a line as answered. Returns False if it already was."""
        update = "UPDATE requests SET done = 1 WHERE line = ? AND custom_id IS ? AND NOT done"
        return bool(self._base.execute(update, (line, custom_id)).rowcount)

    @property
    def done(self) -> int:
        """The number of lines that the output holds."""
        (count,) = self._base.execute("SELECT count(*) FROM requests WHERE done").fetchone()
        return int(count)

    def missing(self) -> Iterator[Entry]:
        """Return the lines that the output lacks, in file order."""
        rows = self._base.execute(
            "SELECT line, offset, size, custom_id, problem FROM requests WHERE NOT done ORDER BY line"
        )
        return map(Entry._make, rows)

    def place(self, entry: Entry, key: bytes) -> None:
        """Store a request's sort key."""
        self._base.execute("INSERT INTO keys VALUES (?, ?)", (entry.line, key))

    @property
    def placed(self) -> int:
        """The number of requests with a sort key."""
        (count,) = self._base.execute("SELECT count(*) FROM keys").fetchone()
        return int(count)

    def in_order(self) -> Iterator[Entry]:
        """Return the requests with a sort key, in order."""
        rows = self._base.execute(
            "SELECT line, offset, size, custom_id, problem FROM keys JOIN requests USING (line) ORDER BY key, line"
        )
        return map(Entry._make, rows)

    def read(self, entry: Entry) -> BatchLine:
        """Read a request from the file. Raises ParameterError if the file has changed."""
        self._file.seek(entry.offset)
        with suppress(LineError):
            line = parse_line(self._file.read(entry.size), first=entry.line == 1)
            if line.custom_id == entry.custom_id:
                return line
        raise ParameterError(
            f"{self.path}:{entry.line}: changed while the batch ran; leave the file as it is",
            code="batch.input_changed",
        )

    def _scan(self, progress: Progress) -> str:
        """Read the file once; returns its digest."""
        digest, size, number, at = hashlib.sha256(), os.fstat(self._file.fileno()).st_size, 0, 0
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            digest.update(line)
            length, rest = len(line), line
            while not rest.endswith(b"\n") and (rest := self._file.readline(MAX_LINE_BYTES)):
                digest.update(rest)  # the rest of a line that is too long
                length += len(rest)
            if line.strip():
                self._add(number, at, length, line)
            at += length
            if number % _REPORT_EVERY == 0:
                progress(Stage.READING, at, size)
        if not self.requests:
            raise ParameterError(f"{self.path}: holds no requests; write one a line", code="batch.empty_input")
        return digest.hexdigest()

    def _add(self, number: int, offset: int, size: int, line: bytes) -> None:
        custom_id: str | None
        try:
            custom_id, problem = parse_line(line, first=number == 1).custom_id, None
        except LineError as error:
            custom_id, problem = error.custom_id, str(error)
        insert = "INSERT INTO requests (line, offset, size, custom_id, problem) VALUES (?, ?, ?, ?, ?)"
        try:
            self._base.execute(insert, (number, offset, size, custom_id, problem))
        except sqlite3.IntegrityError:
            (first,) = self._base.execute("SELECT line FROM requests WHERE custom_id = ?", (custom_id,)).fetchone()
            raise ParameterError(
                f"{self.path}:{number}: the custom_id {custom_id!r} is that of line {first} as well; give every "
                "request its own custom_id",
                code="batch.duplicate_id",
            ) from None
        self.requests += 1


def _opened(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening, because a pipe would block
            raise ParameterError(
                f"{path}: is no regular file, and must be read twice; write the requests to a file",
                code="batch.unreadable_input",
            )
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from None
    if file.peek(2)[:2] == b"\x1f\x8b":
        file.close()
        raise ParameterError(f"{path}: is compressed; decompress it first (gunzip)", code="batch.unreadable_input")
    return file


def _unreadable(path: Path, error: OSError) -> ParameterError:
    if isinstance(error, FileNotFoundError):
        return ParameterError(f"{path}: no such file; check the path", code="batch.unreadable_input")
    return ParameterError(
        f"{path}: cannot be read ({error.strerror or error}); check the path", code="batch.unreadable_input"
    )


def sort_key(llm: AsyncLLM, call: Call) -> bytes:
    """Return the sort key of a request, by its first prompt. Raises InlayError for a wrong prompt."""
    prompt = call.prompts[0]
    made_with = f"{call.model if call.model in llm.adapters else ''}\0".encode()
    ids = np.array(llm.lay_out(prompt, reuse=call.reuse, positions=call.positions).ids, dtype=">u4").tobytes()
    if not isinstance(prompt, Prompt):
        return made_with + b"\0" + ids  # no schema has an empty name
    return made_with + f"{prompt.schema}\0{call.reuse}\0{call.positions}\0".encode() + ids


class Stage(StrEnum):
    """The stage of a batch. Reading counts bytes; the other two count requests."""

    READING = "reading"
    SORTING = "sorting"
    ANSWERING = "answering"


#: Called with the stage, the amount done, and the total.
Progress = Callable[[Stage, int, int], None]


@dataclass
class BatchCounts:
    """Counters of a batch and of this run.

    Args:
        requests: lines of the input that are not blank.
        done_before: requests that the output already held.
        answered, failed: requests in the output now.
        prompt_tokens, cached_tokens, completion_tokens: of the requests answered by this run.
        started: the start of answering in seconds of ``perf_counter``. None before.
    """

    requests: int = 0
    done_before: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    started: float | None = field(default=None, compare=False)

    @property
    def done(self) -> int:
        return self.answered + self.failed

    @property
    def seconds(self) -> float:
        """Seconds since answering started."""
        return 0.0 if self.started is None else time.perf_counter() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Prompt and answer tokens per second."""
        tokens = self.prompt_tokens + self.completion_tokens
        return tokens / self.seconds if tokens else 0.0

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that came from the store."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Count an answered request."""
        self.answered += 1
        for output in outputs:
            self.prompt_tokens += output.usage.prompt_tokens
            self.cached_tokens += output.usage.cached_tokens
            self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def describe(self) -> dict[str, Any]:
        """Return all counters for one line of JSON."""
        return {
            "requests": self.requests,
            "answered": self.answered,
            "failed": self.failed,
            "done_before": self.done_before,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_share": round(self.cached_share, 4),
            "completion_tokens": self.completion_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
        }
