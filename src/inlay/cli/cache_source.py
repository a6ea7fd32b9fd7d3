"""The interface of ``inlay cache`` to segments in a folder or on a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from inlay.errors import ParameterError

Row = Mapping[str, Any]
"""A segment: at least its key in hex, "tokens", "bytes", "codec", "uses" (or None) and "pinned"."""

SHOWN = 12  # characters of a key


class RefusedFileError(Exception):
    """A file is damaged, or is no segment for this store. The message has the reason."""


class CacheSource(ABC):
    """The segments of a folder or of a running server. ``place`` is the folder; None for a server."""

    place: Path | None = None

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return all segments."""

    @abstractmethod
    def table(self, rows: Iterable[Row]) -> Iterator[str]:
        """Return segments as lines of text below a heading."""

    @abstractmethod
    def describe(self, row: Row) -> Row:
        """Return all stored details of a segment."""

    @abstractmethod
    def pin(self, row: Row, pinned: bool) -> None:
        """Pin or unpin a segment."""

    @abstractmethod
    def evict(self, row: Row) -> None:
        """Remove a segment, even a pinned one."""

    def evict_all(self) -> tuple[int, int, int]:
        """Remove all segments; returns how many, their bytes, and how many the caller may not remove."""
        rows = self.rows()
        for row in rows:
            self.evict(row)
        return len(rows), sum(row["bytes"] for row in rows), 0

    @abstractmethod
    def verify(self, tell: Callable[[str], object]) -> tuple[int, int]:
        """Read every file, and report and remove damaged ones. Returns the numbers of intact and damaged files."""

    @abstractmethod
    def stats(self) -> Row:
        """Return totals."""

    @abstractmethod
    def summary(self, stats: Row) -> Iterator[str]:
        """Return totals as lines of text."""

    @abstractmethod
    def export(self, rows: Iterable[Row], draft: Path) -> int:
        """Write the files of segments into a tar file; returns their number. Raises OSError."""

    @abstractmethod
    def check_takes(self) -> None:
        """Raise ParameterError, before a file is sent, if files cannot be imported."""

    @abstractmethod
    def take(self, content: IO[bytes], size: int) -> None:
        """Import a segment's file of ``size`` bytes. Raises RefusedFileError."""

    def chosen(self, keys: Sequence[str] | None, *, every: bool = False) -> Sequence[Row]:
        """Return the one segment for each key prefix, or all. Raises ParameterError."""
        if bool(keys) == every:
            raise ParameterError("name segments by their keys, or give --all")
        rows = self.rows()
        if every:
            return rows
        chosen: list[Row] = []
        for begun in keys or ():
            found = [row for row in rows if row["key"].startswith(begun.lower())]
            if len(found) != 1:
                raise ParameterError(f"{len(found)} segments have a key that begins with '{begun}'; see inlay cache ls")
            chosen += found
        return chosen
