"""One segment in one file.

A file is written under another name, to its end, synchronised, and only then given its own name; it is never changed
or shortened afterwards, only unlinked, so who has it open reads on. It is read, not mapped: where another program cut
a mapped file short, touching it would end the process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from inlay.kv.codecs.codec import Slab
from inlay.kv.tiers.form import Encoded
from inlay.kv.tiers.record import SegmentRecord
from inlay.kv.tiers.tier import Miss, TierMissError
from inlay.whole_file import sync_folder

#: Linux reads ahead of who asks for much. Behind a request for a few bytes, which a header begins with, it may not, for
#: as long as the file is open: a cold file then takes two to four times as long.
FIRST_BYTES = 1 << 18


class FileSource:
    """An open file as the bytes of a segment. whole: whether all of it will be read. Raises OSError."""

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
    """A file under another name than a segment's, its owner's alone, open for writing; gone behind it unless renamed.

    It is locked, so that nobody takes it for one that a process left which was ended (``remove_drafts``), until this
    process ends, too. Raises OSError.
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
    """Write a segment's file so that it is there whole, or not at all; returns its size. Raises OSError."""
    encoded = Encoded.of(record, slabs)
    with new_draft(folder) as (draft, file):
        for part in (memoryview(encoded.header), *(slab.data for slab in encoded.slabs)):
            write_all(file, part)
        os.fsync(file)
        os.rename(draft, folder / name)
    sync_folder(folder)
    return encoded.size


def remove_drafts(folder: Path) -> None:
    """Remove what processes left that were ended while they wrote. Raises OSError."""
    for draft in folder.glob(".draft-*"):
        with suppress(FileNotFoundError, BlockingIOError, PermissionError):
            file = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(draft)
            finally:
                os.close(file)


def write_all(file: int, data: memoryview) -> None:
    """All of these bytes, however few a call takes. Raises OSError."""
    while data:
        data = data[os.write(file, data) :]
