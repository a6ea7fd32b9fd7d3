"""Atomic file replacement: after a crash the file is either old or new, never partial."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, data: bytes, *, durable: bool = True, keep_owner: bool = False) -> None:
    """Replace a file in one step by a new one with mode 0600.

    Args:
        durable: if True, fsync the file and its folder, so that it survives a crash of the machine. That is slow.
        keep_owner: if True, the new file belongs to the old one's user and group.

    Raises:
        OSError: then nothing has changed.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".draft-{path.name[:64]}-")
    try:
        with open(handle, "wb") as file:
            if keep_owner:
                with suppress(FileNotFoundError):
                    old = path.stat()
                    os.fchown(handle, old.st_uid, old.st_gid)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(handle)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that its names survive a crash of the machine. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
