"""Reads documents from strings, from files, and from the files that a schema names in ``src``.

Only regular files of bounded size are read, because a device or a pipe would never end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PureWindowsPath

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.pml import nodes as limits
from inlay.pml.parser import place_at
from inlay.wording import quote

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class UnreadableError(Exception):
    """A file cannot be read. The message gives the reason and the remedy."""


def document_from_string(text: str, source: str) -> bytes:
    """Encode the text as UTF-8 without a byte order mark.

    Raises:
        PMLError: The text holds a lone surrogate or is too large.
        ParameterError: It is not a str.
    """
    if not isinstance(text, str):
        kind = type(text).__name__
        raise ParameterError(
            f"from_string takes a str, not {kind}; decode it, or give a path to from_file", code="parameter.wrong_type"
        )
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        place = place_at(source, text[: error.start])
        raise _refused(
            place,
            "a lone surrogate is not a character; decode the text properly or leave it out",
            code="pml.invalid_character",
        ) from None
    if len(data) > limits.MAX_BYTES:
        raise _refused(Place(source), _too_large(limits.MAX_BYTES), code="pml.too_large")
    return data.removeprefix(_BOM)


def document_from_file(path: str | os.PathLike[str]) -> bytes:
    """Read a file in UTF-8 and drop its byte order mark; raises PMLError if it is unreadable or not UTF-8."""
    source = os.fsdecode(path)
    try:
        data = _read(source, limits.MAX_BYTES)
    except UnreadableError as error:
        raise _refused(Place(source), str(error), code="pml.unreadable_file") from None
    try:
        data.decode()
    except UnicodeDecodeError as error:
        place = place_at(source, data[: error.start].decode())
        raise _refused(place, _not_utf8(data), code="pml.wrong_encoding") from None
    return data.removeprefix(_BOM)


def is_json(path: str) -> bool:
    """Return True if a file of this name holds JSON instead of PML."""
    return path.lower().endswith(".json")


class Folder:
    """The folder of a schema. Its modules may name files in this folder in ``src``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._left = limits.MAX_SOURCE_BYTES

    def name(self, src: str) -> str:
        """Return the file's path for error messages."""
        return str(Path(self._path) / src)

    def read(self, src: str) -> str:
        """Return the file's text with LF line breaks; raises UnreadableError.

        Counts against MAX_SOURCE_BYTES, the limit for all files of one schema together.
        """
        if not src:
            raise UnreadableError('src is empty; write src="…" with the name of a file beside the schema')
        if os.path.isabs(src) or PureWindowsPath(src).anchor:
            raise UnreadableError(f"src={quote(src)} is an absolute path; write it relative to the schema's folder")
        folder = Path(os.path.realpath(self._path))
        path = Path(os.path.realpath(folder / src))
        if not path.is_relative_to(folder):
            raise UnreadableError(f"src={quote(src)} leaves the schema's folder; move the file beside the schema")
        try:
            data = _read(str(path), min(self._left, limits.MAX_BYTES))
        except UnreadableError as error:
            raise UnreadableError(f"src={quote(src)}: {error}") from None
        self._left -= len(data)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise UnreadableError(f"src={quote(src)}: {_not_utf8(data)}") from None
        if "\0" in text:
            raise UnreadableError(f"src={quote(src)}: holds NUL characters; name a file of text, saved as UTF-8")
        return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _read(path: str, most: int) -> bytes:
    try:
        # Checked before opening, because opening a device can act on it. Checked after, because the path may have
        # changed.
        _regular(os.stat(path).st_mode)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            _regular(os.fstat(file.fileno()).st_mode)
            data = file.read(most + 1)
    except FileNotFoundError:
        raise UnreadableError("no such file; check the path") from None
    except PermissionError:
        raise UnreadableError("permission denied; make the file readable") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableError(f"cannot be read ({reason}); check the path") from None
    if len(data) > most:
        raise UnreadableError(_too_large(most))
    return data


def _regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise UnreadableError("is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise UnreadableError("is not a regular file; name a file on disk, or read it yourself and use from_string")


def _not_utf8(data: bytes) -> str:
    if data.startswith(_UTF16_BOMS):
        return "is UTF-16; save it as UTF-8"
    return "is not UTF-8; save it as UTF-8"


def _too_large(most: int) -> str:
    return f"is larger than the {most} bytes that are allowed; split it"


def _refused(place: Place, message: str, *, code: str) -> PMLError:
    return PMLError([Problem(place, message, code=code)])
