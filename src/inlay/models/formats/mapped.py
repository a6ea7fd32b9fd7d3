"""Reads weights of mapped files directly into the memory that they are joined in.

A copy of mapped memory stops every few pages. If the file is not in memory, it waits for the disk in small pieces. A
read call for the same bytes does neither, and takes a fraction of the processor time.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

STEP = 64 << 20  # bytes of one read
_MAPS = Path("/proc/self/maps")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r\S+ ([0-9a-f]+) \S+ [1-9]\d* +(/.*)")


class _Range(NamedTuple):
    """The addresses of a mapped file, and the offset of the first one in the file."""

    first: int
    last: int
    offset: int
    path: str


class MappedFiles:
    """The present memory maps of some files in this process. Empty if the system does not list maps."""

    def __init__(self, paths: Sequence[Path]) -> None:
        wanted = {os.path.realpath(path) for path in paths}
        self._ranges = sorted(each for each in _mapped() if each.path in wanted)
        self._firsts = [each.first for each in self._ranges]
        self._files: dict[str, int] = {}

    def close(self) -> None:
        """Close the opened files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, tensor: Tensor, into: Tensor) -> bool:
        """Read a tensor's bytes from its file. Returns False if it is in no file, or on an error.

        Args:
            into: Contiguous memory of the same dtype and size.
        """
        place = self._place(tensor) if tensor.is_contiguous() and into.dtype == tensor.dtype else None
        if place is None:
            return False
        path, offset = place
        memory = memoryview(into.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            at = 0
            while at < len(memory):
                count = os.preadv(self._files[path], [memory[at : at + STEP]], offset + at)
                if count == 0:
                    return False
                at += count
        except OSError:  # the copy of the mapped memory will report the error
            return False
        return True

    def _place(self, tensor: Tensor) -> tuple[str, int] | None:
        """The file of a tensor's bytes, and their offset in it."""
        first = tensor.data_ptr()
        number = bisect_right(self._firsts, first) - 1
        if number < 0 or first + tensor.nbytes > self._ranges[number].last:
            return None
        found = self._ranges[number]
        return found.path, found.offset + first - found.first


def _mapped() -> Iterator[_Range]:
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        # the path of a deleted file ends with "(deleted)" and matches no wanted file
        if (found := _LINE.fullmatch(line)) is not None:
            first, last, offset = (int(word, 16) for word in found.groups()[:3])
            yield _Range(first, last, offset, found[4])


_current: ContextVar[MappedFiles | None] = ContextVar("inlay_mapped", default=None)


@contextmanager
def mapped_files(paths: Sequence[Path]) -> Iterator[None]:
    """Within the block, on this thread: ``copy`` reads tensors in these files with read calls."""
    files = MappedFiles(paths)
    token = _current.set(files)
    try:
        yield
    finally:
        _current.reset(token)
        files.close()


def copy(tensor: Tensor, into: Tensor) -> None:
    """Copy a tensor into contiguous memory of its shape and dtype, on the CPU."""
    files = _current.get()
    if files is None or not files.read(tensor, into):
        into.copy_(tensor)
