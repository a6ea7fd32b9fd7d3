"""Reading of weights from disk: progress reports, and a thread that reads ahead.

A checkpoint is mapped, and a thread that touches a page outside memory waits for the disk. So a separate thread reads
the pages in the order of the model's parts, at most one window ahead.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

logger = logging.getLogger(__name__)

#: Bytes that are read ahead. With more, a small memory would lose pages before they are used.
WINDOW = 1 << 30
_STEP = 8 << 20  # bytes of one read
_HEADER = 64 << 20  # largest accepted header, in bytes

_report: ContextVar[Callable[[int, int], None] | None] = ContextVar("report", default=None)


@contextmanager
def weights_progress(report: Callable[[int, int], None]) -> Iterator[None]:
    """Within the block, on this thread: report the loaded bytes of a model's weights, and their total."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars. They count mapped weights, of which nothing is read yet."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


class Counter:
    """Reports how many bytes of a model's weights are loaded: to ``weights_progress``, on a terminal, and finally in
    the log.

    Args:
        name: Name of the model.
        total: Bytes of the weights as stored.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._began = time.monotonic()
        self._tell = _report.get()
        self._bar: Any = tqdm(
            total=total, desc="Loading weights", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()
        )
        self._told()

    def add(self, size: int) -> float:
        """Count ``size`` more bytes. Returns the share of the total."""
        self._done += size
        self._bar.update(size)
        self._told()
        return self._done / max(1, self._total)

    def close(self) -> None:
        """Close the progress bar and log the total."""
        self._bar.close()
        seconds = time.monotonic() - self._began
        rate = self._done / max(seconds, 1e-6) / 1e9
        size, many = self._done / 1e9, "%s: %.2f GB of weights in %.1f s (%.2f GB/s)"
        logger.info(many, self._name, size, seconds, rate)

    def _told(self) -> None:
        if self._tell is not None:
            self._tell(self._done, self._total)


class ByteRange(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    offset: int
    size: int


def pieces_of(paths: Sequence[Path], keep: Callable[[str], bool] | None = None) -> list[ByteRange]:
    """Return the tensors of files in the order of the model's parts. Files in other formats are one piece each.

    Args:
        keep: Returns False for the name of a tensor that is not needed. None: all are.
    """
    found: list[tuple[Any, ByteRange]] = []
    for path in paths:
        size = path.stat().st_size
        tensors = _tensors(path, size) if path.suffix == ".safetensors" else {path.name: (0, size)}
        if keep is not None:
            tensors = {name: place for name, place in tensors.items() if keep(name)}
        found += [(_order(name), ByteRange(path, first, last - first)) for name, (first, last) in tensors.items()]
    return [piece for _, piece in sorted(found, key=lambda each: each[0])]


def tensor_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the tensors in files of safetensors."""
    return [name for path in paths for name in _tensors(path, path.stat().st_size)]


def _tensors(path: Path, size: int) -> dict[str, tuple[int, int]]:
    """The byte ranges of the tensors of a file. The whole file if its header is invalid."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= min(_HEADER, size) else {}
        begin = 8 + length
        places = {name: each["data_offsets"] for name, each in header.items() if name != "__metadata__"}
        return {name: (begin + int(first), begin + int(last)) for name, (first, last) in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {path.name: (0, size)}  # the later load reports the error


def _order(name: str) -> list[tuple[int, int | str]]:
    """Sort key of a tensor name: the embedding, then layers by number, then the head."""
    words: list[tuple[int, int | str]] = [(0, int(w)) if w.isdigit() else (1, w) for w in re.split(r"[.\-]", name)]
    return [(2, ""), *words] if "head" in name or name.startswith("output.") else words


@dataclass
class ReadAhead:
    """Reads pieces of files ahead within a ``with`` block, so that they are in memory when they are touched.

    The data is dropped, because the page cache keeps it. Asking the system for the pages (posix_fadvise) takes more
    processor time, and a page that is touched too early is read alone.

    Args:
        pieces: In the order in which they are needed.
        window: Bytes to read ahead of the present position.
    """

    pieces: Sequence[ByteRange]
    window: int = WINDOW
    _needed: int = 0
    _ended: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __enter__(self) -> ReadAhead:
        if self.pieces and hasattr(os, "preadv"):
            self._thread = threading.Thread(target=self._run, name="inlay-read-ahead", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def reached(self, share: float) -> None:
        """Report the share of all bytes that is used, from 0 to 1."""
        with self._changed:
            self._needed = int(share * sum(piece.size for piece in self.pieces))
            self._changed.notify_all()

    def _run(self) -> None:
        at, buffer = 0, bytearray(_STEP)
        for path, pieces in _by_file(self.pieces):
            try:
                file = os.open(path, os.O_RDONLY)
            except OSError:  # the later load reports the error
                return
            try:
                for piece in pieces:
                    for offset in range(piece.offset, piece.offset + piece.size, _STEP):
                        if not self._may(at):
                            return
                        size = min(_STEP, piece.offset + piece.size - offset)
                        os.preadv(file, [memoryview(buffer)[:size]], offset)
                        at += size
            except OSError:
                return
            finally:
                os.close(file)

    def _may(self, at: int) -> bool:
        """Wait until the position ``at`` is within the window. Returns False if the block has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or at <= self._needed + self.window)
            return not self._ended


def _by_file(pieces: Sequence[ByteRange]) -> Iterator[tuple[Path, list[ByteRange]]]:
    """Group consecutive pieces of the same file."""
    run: list[ByteRange] = []
    for piece in pieces:
        if run and piece.path != run[0].path:
            yield run[0].path, run
            run = []
        run.append(piece)
    if run:
        yield run[0].path, run
