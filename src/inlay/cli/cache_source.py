"""What ``inlay cache`` asks of the segments that it shows and changes, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from inlay.errors import ParameterError

Row = Mapping[str, Any]
"""A segment: at least its key in hex, "tokens", "bytes", "codec", "uses" (or None) and whether it is "pinned"."""

SHOWN = 12  # characters of a key


class RefusedFileError(Exception):
    """A file is no whole segment, or not one for here, and why."""


class CacheSource(ABC):
    """The segments of a folder, or of a server that runs. place: the folder; None for a server."""

    place: Path | None = None

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """All segments."""

    @abstractmethod
    def table(self, rows: Iterable[Row]) -> Iterator[str]:
        """Segments as lines for people, below a line of headings."""

    @abstractmethod
    def describe(self, row: Row) -> Row:
        """All that is written of a segment."""

    @abstractmethod
    def pin(self, row: Row, pinned: bool) -> None:
        """Keep a segment from being evicted, or let it be evicted again."""

    @abstractmethod
    def evict(self, row: Row) -> None:
        """Remove a segment, pinned or not."""

    def evict_all(self) -> tuple[int, int, int]:
        """Remove all segments; returns how many, their bytes, and how many the caller may not remove."""
        rows = self.rows()
        for row in rows:
            self.evict(row)
        return len(rows), sum(row["bytes"] for row in rows), 0

    @abstractmethod
    def verify(self, tell: Callable[[str], object]) -> tuple[int, int]:
        """Read every file and remove damaged ones, telling of each; returns how many are whole, and were damaged."""

    @abstractmethod
    def stats(self) -> Row:
        """How much there is."""

    @abstractmethod
    def summary(self, stats: Row) -> Iterator[str]:
        """How much there is as lines for people."""

    @abstractmethod
    def export(self, rows: Iterable[Row], draft: Path) -> int:
        """Write the files of segments into a tar file; returns how many have one. Raises OSError."""

    @abstractmethod
    def check_takes(self) -> None:
        """Raises ParameterError where no files are taken in, before one is sent."""

    @abstractmethod
    def take(self, content: IO[bytes], size: int) -> None:
        """Take a segment's file in, of ``size`` bytes. Raises RefusedFileError for what is none."""

    def chosen(self, keys: Sequence[str] | None, *, every: bool = False) -> Sequence[Row]:
        """The segments whose keys begin so, one for each, or all. Raises ParameterError."""
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
