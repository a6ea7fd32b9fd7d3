"""Where the requests of an input file stand, and in which order to run them: a temporary database, not their contents.

SQLite keeps it in a file without a name, which ends with the process, and of that a bounded part in memory; so the
input may be larger than memory. A request takes about 30 bytes and twice its custom_id there (58 bytes, measured, with
ids of 14), and about 5 for every token of its prompt while it waits. SQLITE_TMPDIR says in which folder.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from inlay.batch.counts import Progress, Stage
from inlay.batch.lines import MAX_LINE_BYTES, BatchLine, LineError, parse_line
from inlay.errors import ParameterError

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
    """A line, from 1: where it begins and how many bytes it has; what is wrong with it where it is no request."""

    line: int
    offset: int
    size: int
    custom_id: str | None
    problem: str | None


class Index:
    """The requests of one input file. Use it as a context manager.

    sha256: of the whole file. requests: how many lines are not blank.
    Raises ParameterError where the file cannot be read, or two requests have one custom_id.
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
        """Note that the output holds this line's answer. Returns whether it was missing until now."""
        update = "UPDATE requests SET done = 1 WHERE line = ? AND custom_id IS ? AND NOT done"
        return bool(self._base.execute(update, (line, custom_id)).rowcount)

    @property
    def done(self) -> int:
        """How many lines the output holds already."""
        (count,) = self._base.execute("SELECT count(*) FROM requests WHERE done").fetchone()
        return int(count)

    def missing(self) -> Iterator[Entry]:
        """The lines that the output does not hold, as they stand in the file."""
        rows = self._base.execute(
            "SELECT line, offset, size, custom_id, problem FROM requests WHERE NOT done ORDER BY line"
        )
        return map(Entry._make, rows)

    def place(self, entry: Entry, key: bytes) -> None:
        """Give a request its place in the order: that of its key."""
        self._base.execute("INSERT INTO keys VALUES (?, ?)", (entry.line, key))

    @property
    def placed(self) -> int:
        """How many requests have a place."""
        (count,) = self._base.execute("SELECT count(*) FROM keys").fetchone()
        return int(count)

    def in_order(self) -> Iterator[Entry]:
        """The requests that have a place, in order."""
        rows = self._base.execute(
            "SELECT line, offset, size, custom_id, problem FROM keys JOIN requests USING (line) ORDER BY key, line"
        )
        return map(Entry._make, rows)

    def read(self, entry: Entry) -> BatchLine:
        """A request from the file. Raises ParameterError where another stands there by now."""
        self._file.seek(entry.offset)
        with suppress(LineError):
            line = parse_line(self._file.read(entry.size), first=entry.line == 1)
            if line.custom_id == entry.custom_id:
                return line
        raise ParameterError(f"{self.path}:{entry.line}: changed while the batch ran; leave the file as it is")

    def _scan(self, progress: Progress) -> str:
        """Read the file once; returns its digest."""
        digest, size, number, at = hashlib.sha256(), os.fstat(self._file.fileno()).st_size, 0, 0
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            digest.update(line)
            length, rest = len(line), line
            while not rest.endswith(b"\n") and (rest := self._file.readline(MAX_LINE_BYTES)):
                digest.update(rest)  # of a line that is too long: the end of it is nowhere kept
                length += len(rest)
            if line.strip():
                self._add(number, at, length, line)
            at += length
            if number % _REPORT_EVERY == 0:
                progress(Stage.READING, at, size)
        if not self.requests:
            raise ParameterError(f"{self.path}: holds no requests; write one a line")
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
                "request one of its own, so that its answer can be told"
            ) from None
        self.requests += 1


def _opened(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would wait for a writer
            raise ParameterError(f"{path}: is no file that can be read twice; write the requests to one")
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from None
    if file.peek(2)[:2] == b"\x1f\x8b":
        file.close()
        raise ParameterError(f"{path}: is compressed; decompress it first (gunzip)")
    return file


def _unreadable(path: Path, error: OSError) -> ParameterError:
    if isinstance(error, FileNotFoundError):
        return ParameterError(f"{path}: no such file; check the path")
    return ParameterError(f"{path}: cannot be read ({error.strerror or error}); check the path")
