"""The byte format of one segment, and the file that holds it: safetensors, with every byte under a checksum.

    8 bytes     length of the header
    header      JSON: the record and the checksums, and the offset of each tensor; padded with spaces, so that
    4,096 · n   the first slab begins at a whole page
    slabs       layer by layer, in the record's codec, each filled up to whole pages by a tensor of zeros
    state       of a model with recurrent layers: one more slab, filled up in the same way

Without a codec a slab is the keys, then the values, (2, kv_heads, tokens, head_dim), in the KV dtype. The bytes are the
same in every tier. They are not trusted: readers check each part before they use it.

``write_file`` writes one segment as one file. A file is written under a draft name, synced, and then renamed. It never
changes afterwards and is only unlinked, so open readers can finish. Files are read, not mapped: if another program
truncated a mapped file, an access would kill the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from inlay.kv.identity import LABEL_BYTES
from inlay.kv.offload.codecs import CODECS, Slab
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import Miss, TierMissError
from inlay.whole_file import sync_folder

FORM = 1  # each format has its own location and is never read as another
PAGE = 4096
_MOST_HEADER = 64 << 20
_FORM_KEY = "inlay"


class UnknownFormError(TierMissError):
    """The segment has a format or codec that this version does not know. It is left alone."""


class Source(Protocol):
    """The stored bytes of one segment. ``size`` is their number."""

    @property
    def size(self) -> int: ...

    def fill(self, buffer: memoryview, at: int) -> None:
        """Fill the buffer with the bytes from ``at`` on. Raises TierMissError, or OSError for a file."""
        ...


def pages(size: int) -> int:
    """A size rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Header:
    """The part in front of the slabs. ``checksums``: the CRC-32 of each slab, including its page filling."""

    record: SegmentRecord
    checksums: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """The file up to its first slab. Equal headers give equal bytes, so every byte can be checked."""
        said = {"form": FORM, **self.record.to_json(), "checksums": list(self.checksums)}
        text = json.dumps(said, separators=(",", ":"))
        table: dict[str, Any] = {"__metadata__": {_FORM_KEY: text, "checksum": f"{zlib.crc32(text.encode()):08x}"}}
        at = 0
        for number in range(self.record.slabs):
            begin = at
            for part in self.record.slab_parts(number):
                table[part.name] = _tensor(part.dtype, part.shape, at, part.nbytes)
                at += part.nbytes
            filling = pages(at - begin) - (at - begin)
            if filling:
                owner = "state" if number == len(self.record.layers) else f"layers.{number}"
                table[f"{owner}.filling"] = _tensor("U8", (filling,), at, filling)
                at += filling
        header = json.dumps(table, separators=(",", ":")).encode()
        header += b" " * (pages(8 + len(header)) - 8 - len(header))
        return len(header).to_bytes(8, "little") + header

    @property
    def slabs_bytes(self) -> int:
        return sum(pages(self.record.slab_bytes(number)) for number in range(self.record.slabs))


def _tensor(dtype: str, shape: Sequence[int], at: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A segment as bytes: the header, and each slab filled up to whole pages."""

    header: bytes
    slabs: tuple[npt.NDArray[np.uint8], ...]

    @classmethod
    def of(cls, record: SegmentRecord, slabs: Iterable[Slab]) -> Encoded:
        """Encode a segment from one slab per layer, in the pool's format, and its state if the record has one."""
        filled = tuple(_filled(record.encode(number, slab)) for number, slab in enumerate(slabs))
        return cls(Header(record, tuple(zlib.crc32(slab.data) for slab in filled)).to_bytes(), filled)

    @property
    def size(self) -> int:
        return len(self.header) + sum(map(len, self.slabs))


def size_of(record: SegmentRecord) -> int:
    """The most bytes that a segment takes, known before it is encoded."""
    header = Header(record, (2**32 - 1,) * record.slabs)
    return len(header.to_bytes()) + header.slabs_bytes


def read_header(source: Source) -> tuple[Header, int]:
    """Read a segment's header and the offset of its first slab. Raises TierMissError and OSError."""
    size = source.size
    length = int.from_bytes(_exactly(source, 8, 0), "little")
    if not 2 <= length <= min(_MOST_HEADER, size - 8) or (8 + length) % PAGE:
        raise TierMissError(Miss.CORRUPT, f"it says that its header has {length} bytes, of {size}")
    written = _exactly(source, length, 8)
    try:
        metadata = json.loads(written)["__metadata__"]
        said = json.loads(metadata[_FORM_KEY])
        if metadata["checksum"] == f"{zlib.crc32(metadata[_FORM_KEY].encode()):08x}":
            _check_form(said)
        header = Header(SegmentRecord.from_json(said), tuple(map(int, said["checksums"])))
        right = len(header.checksums) == header.record.slabs and header.to_bytes()[8:] == written
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise TierMissError(Miss.CORRUPT, f"its header cannot be read ({type(error).__name__}: {error})") from None
    if not right or not header.record.key_holds():
        raise TierMissError(Miss.CORRUPT, "its header is damaged")
    if size != 8 + length + header.slabs_bytes:
        raise TierMissError(Miss.CORRUPT, f"it has {size} bytes in place of {8 + length + header.slabs_bytes}")
    return header, 8 + length


def _check_form(said: dict[str, Any]) -> None:
    """Raises UnknownFormError for formats of a newer version."""
    form, codec = said["form"], said.get("codec")
    if form != FORM:
        raise UnknownFormError(Miss.ABSENT, f"it is of form {form!r:.20}, and this inlay reads form {FORM}")
    if codec not in CODECS:
        raise UnknownFormError(Miss.ABSENT, f"it is of codec {codec!r:.20}, and this inlay knows {', '.join(CODECS)}")


def read_segment(
    source: Source, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]
) -> None:
    """Deliver the slabs of the wanted segment, each once it is checked; see Tier.get.

    Raises TierMissError, which includes a segment other than the wanted one, and OSError.
    """
    header, at = read_header(source)
    if not header.record.same(asked):
        raise TierMissError(Miss.CORRUPT, "it holds another segment than its name says")
    read_slabs(source, header, at, take, late)


def read_slabs(
    source: Source, header: Header, at: int, take: Callable[[int, Slab], None], late: Callable[[], bool]
) -> None:
    """Deliver each slab behind a header, once its checksum holds. Raises TierMissError and OSError."""
    record = header.record
    buffer = np.empty(max(pages(record.slab_bytes(number)) for number in range(record.slabs)), np.uint8)
    for layer, checksum in enumerate(header.checksums):
        size = record.slab_bytes(layer)
        whole = buffer[: pages(size)]
        source.fill(whole.data, at)
        at += len(whole)
        if zlib.crc32(whole.data) != checksum:
            raise TierMissError(Miss.CORRUPT, f"the checksum of layer {layer} does not hold")
        if late():
            raise TierMissError(Miss.LATE)
        take(layer, record.decode(layer, whole[:size]))


def _filled(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    filling = pages(data.size) - data.size
    return np.concatenate([data, np.zeros(filling, np.uint8)]) if filling else data


def _exactly(source: Source, length: int, at: int) -> bytes:
    buffer = bytearray(length)
    source.fill(memoryview(buffer), at)
    return bytes(buffer)


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


def append_labels(path: Path, labels: Iterable[bytes]) -> None:
    """Append labels to a file of labels, created if needed. Other processes may do so meanwhile. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file).st_size
        os.ftruncate(file, size - size % LABEL_BYTES)  # a process ended while it wrote a label
        write_all(file, memoryview(b"".join(labels)))
    finally:
        os.close(file)


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
