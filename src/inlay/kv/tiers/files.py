"""One segment in one file: safetensors, with every byte under a checksum.

    8 bytes     length of the header
    header      JSON: the record and the checksums, and where each tensor lies; padded with spaces, so that
    4,096 · n   the first slab begins at a whole page
    slabs       layer by layer, keys before values, (2, kv_heads, tokens, head_dim), each filled up to whole pages by a
                tensor of zeros

A file is written under another name, to its end, synchronised, and only then given its own name; it is never changed
or shortened afterwards, only unlinked, so who has it open reads on. It is read, not mapped: where another program cut
a mapped file short, touching it would end the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inlay.kv.tiers.record import DTYPES, SegmentRecord, Slab
from inlay.kv.tiers.tier import Miss, TierMissError

FORM = 1  # of the file; another form lies in another folder, and is never read as this one
PAGE = 4096
_MOST_HEADER = 64 << 20
_FORM_KEY = "inlay"


class UnknownFormError(TierMissError):
    """A file is of a form that this inlay does not know: it is left alone."""


def pages(size: int) -> int:
    """A size rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Header:
    """What stands in front of the slabs. checksums: the CRC-32 of each slab, with the zeros that fill its last page."""

    record: SegmentRecord
    checksums: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """The file up to its first slab. The same header is always the same bytes, so that each of them counts."""
        said = {"form": FORM, **self.record.to_json(), "checksums": list(self.checksums)}
        text = json.dumps(said, separators=(",", ":"))
        table: dict[str, Any] = {"__metadata__": {_FORM_KEY: text, "checksum": f"{zlib.crc32(text.encode()):08x}"}}
        name, _, _ = DTYPES[self.record.kv_dtype]
        at = 0
        for layer in range(len(self.record.layers)):
            size = self.record.slab_bytes(layer)
            table[f"layers.{layer}.kv"] = _tensor(name, self.record.shape(layer), at, size)
            at += size
            filling = pages(size) - size
            if filling:
                table[f"layers.{layer}.filling"] = _tensor("U8", (filling,), at, filling)
                at += filling
        header = json.dumps(table, separators=(",", ":")).encode()
        header += b" " * (pages(8 + len(header)) - 8 - len(header))
        return len(header).to_bytes(8, "little") + header

    @property
    def slabs_bytes(self) -> int:
        return sum(pages(self.record.slab_bytes(layer)) for layer in range(len(self.record.layers)))


def _tensor(dtype: str, shape: Sequence[int], at: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}


def read_header(file: int) -> tuple[Header, int]:
    """The header of an open file, and where its first slab begins. Raises TierMissError and OSError."""
    size = os.fstat(file).st_size
    length = int.from_bytes(_exactly(file, 8, 0), "little")
    if not 2 <= length <= min(_MOST_HEADER, size - 8) or (8 + length) % PAGE:
        raise TierMissError(Miss.CORRUPT, f"it says that its header has {length} bytes, of {size}")
    written = _exactly(file, length, 8)
    try:
        metadata = json.loads(written)["__metadata__"]
        said = json.loads(metadata[_FORM_KEY])
        if metadata["checksum"] == f"{zlib.crc32(metadata[_FORM_KEY].encode()):08x}" and said["form"] != FORM:
            raise UnknownFormError(Miss.ABSENT, f"it is of form {said['form']!r:.20}, and this inlay reads form {FORM}")
        header = Header(SegmentRecord.from_json(said), tuple(map(int, said["checksums"])))
        right = len(header.checksums) == len(header.record.layers) and header.to_bytes()[8:] == written
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise TierMissError(Miss.CORRUPT, f"its header cannot be read ({type(error).__name__}: {error})") from None
    if not right or not header.record.key_holds():
        raise TierMissError(Miss.CORRUPT, "its header is damaged")
    if size != 8 + length + header.slabs_bytes:
        raise TierMissError(Miss.CORRUPT, f"it has {size} bytes in place of {8 + length + header.slabs_bytes}")
    return header, 8 + length


def read_slabs(file: int, header: Header, at: int, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
    """Give each slab behind a header, once its checksum holds. Raises TierMissError and OSError."""
    record = header.record
    buffer = np.empty(max(pages(record.slab_bytes(layer)) for layer in range(len(record.layers))), np.uint8)
    for layer, checksum in enumerate(header.checksums):
        size = record.slab_bytes(layer)
        whole = buffer[: pages(size)]
        _fill(file, whole.data, at)
        at += len(whole)
        if zlib.crc32(whole.data) != checksum:
            raise TierMissError(Miss.CORRUPT, f"the checksum of layer {layer} does not hold")
        if late():
            raise TierMissError(Miss.LATE)
        heads = record.layers[layer][0]
        take(layer, whole[:size].reshape(2, heads, record.tokens, -1))


def write_file(folder: Path, name: str, record: SegmentRecord, slabs: Iterable[Slab]) -> int:
    """Write a segment's file so that it is there whole, or not at all; returns its size. Raises OSError."""
    filled = [_filled(slab) for slab in slabs]
    header = Header(record, tuple(zlib.crc32(slab.data) for slab in filled))
    draft = folder / f".draft-{os.getpid()}-{os.urandom(6).hex()}"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # says that somebody is at it, until this process ends
        start = header.to_bytes()
        for part in (memoryview(start), *(slab.data for slab in filled)):
            _write(file, part)
        os.fsync(file)
        os.rename(draft, folder / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    finally:
        os.close(file)
    sync_folder(folder)
    return len(start) + header.slabs_bytes


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


def sync_folder(folder: Path) -> None:
    """See to it that the names in a folder outlive a fall of the machine. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _filled(slab: Slab) -> Slab:
    flat = np.ascontiguousarray(slab).reshape(-1)
    filling = pages(flat.size) - flat.size
    return np.concatenate([flat, np.zeros(filling, np.uint8)]) if filling else flat


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _exactly(file: int, length: int, at: int) -> bytes:
    buffer = bytearray(length)
    _fill(file, memoryview(buffer), at)
    return bytes(buffer)


def _fill(file: int, buffer: memoryview, at: int) -> None:
    while buffer:
        read = os.preadv(file, [buffer], at)
        if not read:
            raise TierMissError(Miss.CORRUPT, "it ends too early")
        buffer, at = buffer[read:], at + read
