"""The file of keys on disk: others cannot read it, one process at a time changes it, and no crash leaves half of it."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from inlay.errors import ParameterError
from inlay.server.keys import KeyFile

_MAX_BYTES = 64 * 2**20
_RESTORE = "correct it, or put a copy in its place"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one state of a file from the next without reading it."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # its mode may change alone

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_keys(path: Path) -> tuple[KeyFile, Stamp]:
    """What a file of keys says, and which state of the file that is.

    Raises ParameterError where it cannot be read, others may read it, or it is damaged.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            _check_mode(path, found)
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise ParameterError(
                f"{path}: no such file; make it with inlay keys add --file {path} --tenant …"
            ) from None
        raise ParameterError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if len(data) > _MAX_BYTES:
        raise ParameterError(f"{path}: has more than {_MAX_BYTES:,} bytes, which no file of keys has; check the path")
    return _parsed(path, data), Stamp.of(found)


@contextmanager
def editing(path: Path) -> Iterator[KeyFile]:
    """What a file of keys says, to be changed; written when the block ends well. A file that is not there is empty.

    The folder is locked meanwhile, and not the file, which is replaced. Raises ParameterError.
    """
    with _locked(path):
        content = read_keys(path)[0] if path.exists() else KeyFile(version=1)
        yield content
        _write(path, content)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise ParameterError(f"{path}: there is no folder {path.parent}; make it first") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for a writer


def _check_mode(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ParameterError(f"{path}: is no regular file; check the path")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(found.st_mode)
        raise ParameterError(f"{path}: others may read or change it (mode {mode:04o}); run chmod 600 {path}")


def _parsed(path: Path, data: bytes) -> KeyFile:
    try:
        content = KeyFile.model_validate_json(data)
    except ValidationError as error:
        raise ParameterError(f"{path}: {_sentence(error)}; {_RESTORE}") from None
    for key_id, key in content.keys.items():
        if key.tenant not in content.tenants:
            raise ParameterError(
                f"{path}: keys.{key_id} is of the tenant {key.tenant!r:.80}, who is not there; {_RESTORE}"
            )
    return content


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong and where, and how many there are."""
    first, *more = error.errors(include_url=False, include_input=False)
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")
    what = first["msg"].removeprefix("Value error, ")
    return f"{f'{place}: ' if place else ''}{what}{f' (and {len(more)} more)' if more else ''}"


def _write(path: Path, content: KeyFile) -> None:
    """Put a new file in the place of the old one, in one step; a link goes on to point at it, and its owner owns it."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                with suppress(FileNotFoundError):
                    old = os.stat(target)
                    os.fchown(handle, old.st_uid, old.st_gid)  # root may edit what a server's own user reads
                file.write(content.model_dump_json(indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _sync_folder(folder)
    except OSError as error:
        raise ParameterError(f"{path}: cannot be written ({error.strerror}); nothing has changed") from None


def _sync_folder(folder: str) -> None:
    """So that the new name outlives a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
