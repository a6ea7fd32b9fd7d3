"""One segment in one file.

A file is written under a draft name, synced, and then renamed. It never changes afterwards and is only unlinked, so
open readers can finish. Files are read, not mapped: if another program truncated a mapped file, an access would kill
the process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.form import Encoded
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import Miss, TierMissError
from inlay.whole_file import sync_folder

#: A first read of this size triggers Linux's readahead. A short first read, like the header's length, disables it while
#: the file is open. A cold file then takes two to four times as long.
FIRST_BYTES = 1 << 18


class FileSource:
    """An open file as the bytes of a segment. Raises OSError.

    Args:
        whole: True if the whole file will be read.
    """

    def __init__(self, file: int, *, whole: bool = False) -> None:
        self._file = file
        self.size = os.fstat(file).st_size
        self._first = memoryview(b"")
        if whole:
            buffer = memoryview(np.empty(min(self.size, FIRST_BYTES), np.uint8).data)
            self._first = buffer[: os.preadv(file, [buffer], 0)]

    def fill(self, buffer: memoryview, at: int) -> None:
        """See Source."""
        if at + len(buffer) <= len(self._first):
            buffer[:] = self._first[at : at + len(buffer)]
            return
        while buffer:
            read = os.preadv(self._file, [buffer], at)
            if not read:
                raise TierMissError(Miss.CORRUPT, "it ends too early")
            buffer, at = buffer[read:], at + read


@contextmanager
def new_draft(folder: Path) -> Iterator[tuple[Path, int]]:
    """A private draft file, open for writing. It is removed at the end of the block unless it was renamed.

    The file is locked until it is closed. So ``remove_drafts`` of another process leaves it alone. Raises OSError.
    """
    draft = folder / f".draft-{os.getpid()}-{os.urandom(6).hex()}"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield draft, file
    finally:
        with suppress(OSError):
            os.unlink(draft)
        os.close(file)


def write_file(folder: Path, name: str, record: SegmentRecord, slabs: Iterable[Slab]) -> int:
    """Write a segment's file atomically; returns its size. Raises OSError."""
    encoded = Encoded.of(record, slabs)
    with new_draft(folder) as (draft, file):
        for part in (memoryview(encoded.header), *(slab.data for slab in encoded.slabs)):
            write_all(file, part)
        os.fsync(file)
        os.rename(draft, folder / name)
    sync_folder(folder)
    return encoded.size


def remove_drafts(folder: Path) -> None:
    """Remove drafts of processes that ended while they wrote. Raises OSError."""
    for draft in folder.glob(".draft-*"):
        with suppress(FileNotFoundError, BlockingIOError, PermissionError):
            file = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(draft)
            finally:
                os.close(file)


def write_all(file: int, data: memoryview) -> None:
    """Write all bytes, with as many calls as needed. Raises OSError."""
    while data:
        data = data[os.write(file, data) :]
