"""How fast weights come from the disk: told while they do, and read before they are asked for.

A checkpoint is mapped, and whoever touches a page that is not in memory waits for the disk. So a thread of its own asks
for the pages in the order in which the model's parts are made of them, no more than a window before that.
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

#: Bytes that are asked for before they are needed. More would push out of a small memory what is not yet used.
WINDOW = 1 << 30
_STEP = 8 << 20  # bytes at a time
_HEADER = 64 << 20  # bytes of a header, at most

_report: ContextVar[Callable[[int, int], None] | None] = ContextVar("report", default=None)


@contextmanager
def weights_progress(report: Callable[[int, int], None]) -> Iterator[None]:
    """Within the block, on this thread: tell how many bytes of a model's weights are loaded, and how many there are."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without bars of transformers: it counts what it maps, before anything is read."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


class Counter:
    """Tells how much of a model's weights is loaded: to ``weights_progress``, on a terminal, and at its end the log.

    total: bytes of the weights as they are stored.
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
        """So many bytes more are there. Returns the share of all."""
        self._done += size
        self._bar.update(size)
        self._told()
        return self._done / max(1, self._total)

    def close(self) -> None:
        """The last word."""
        self._bar.close()
        seconds = time.monotonic() - self._began
        rate = self._done / max(seconds, 1e-6) / 1e9
        size, many = self._done / 1e9, "%s: %.2f GB of weights in %.1f s (%.2f GB/s)"
        logger.info(many, self._name, size, seconds, rate)

    def _told(self) -> None:
        if self._tell is not None:
            self._tell(self._done, self._total)


class Piece(NamedTuple):
    """Bytes of a file that belong together."""

    path: Path
    offset: int
    size: int


def pieces_of(paths: Sequence[Path]) -> list[Piece]:
    """The tensors of files in the order in which a model's parts are made of them; other files whole, as they come."""
    found: list[tuple[Any, Piece]] = []
    for path in paths:
        size = path.stat().st_size
        tensors = _tensors(path, size) if path.suffix == ".safetensors" else {path.name: (0, size)}
        found += [(_order(name), Piece(path, first, last - first)) for name, (first, last) in tensors.items()]
    return [piece for _, piece in sorted(found, key=lambda each: each[0])]


def _tensors(path: Path, size: int) -> dict[str, tuple[int, int]]:
    """Where the tensors of a file lie; the whole file where its header says nothing that can be."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= min(_HEADER, size) else {}
        begin = 8 + length
        places = {name: each["data_offsets"] for name, each in header.items() if name != "__metadata__"}
        return {name: (begin + int(first), begin + int(last)) for name, (first, last) in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {path.name: (0, size)}  # whoever reads it says what is wrong


def _order(name: str) -> list[tuple[int, int | str]]:
    """Layers by their numbers, the embedding before them, and the head last."""
    words: list[tuple[int, int | str]] = [(0, int(w)) if w.isdigit() else (1, w) for w in re.split(r"[.\-]", name)]
    return [(2, ""), *words] if "head" in name or name.startswith("output.") else words


@dataclass
class ReadAhead:
    """Within a ``with`` block, reads pieces of files before they are touched, so that they are in memory then.

    What is read is thrown away: the page cache has it. Asking the system for the pages (posix_fadvise) takes more of
    the processor's time, and a page that is touched too early is read alone.

    pieces: in the order in which they are needed. window: bytes before what is needed now.
    """

    pieces: Sequence[Piece]
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
        """So much of all is used, of 1."""
        with self._changed:
            self._needed = int(share * sum(piece.size for piece in self.pieces))
            self._changed.notify_all()

    def _run(self) -> None:
        at, buffer = 0, bytearray(_STEP)
        for path, pieces in _by_file(self.pieces):
            try:
                file = os.open(path, os.O_RDONLY)
            except OSError:  # whoever maps it says what is wrong
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
        """Wait until bytes at this place are within the window; False where nobody needs them any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or at <= self._needed + self.window)
            return not self._ended


def _by_file(pieces: Sequence[Piece]) -> Iterator[tuple[Path, list[Piece]]]:
    """Pieces in their order, with neighbours of one file together."""
    run: list[Piece] = []
    for piece in pieces:
        if run and piece.path != run[0].path:
            yield run[0].path, run
            run = []
        run.append(piece)
    if run:
        yield run[0].path, run
