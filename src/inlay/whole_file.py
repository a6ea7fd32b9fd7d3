"""Files that are there whole or as they were, whenever the process or the machine ends."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, data: bytes, *, durable: bool = True, keep_owner: bool = False) -> None:
    """Put a new file in the place of what is there, its owner's alone (mode 0600), in one step.

    durable: whether it outlives a fall of the machine, which takes a while. keep_owner: whether it belongs to whom the
    old one belonged. Raises OSError, and then nothing has changed.
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
    """See to it that the names in a folder outlive a fall of the machine. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
