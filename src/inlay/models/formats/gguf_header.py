"""The header of a GGUF file, read once from the mapped file: metadata and the table of tensors.

Every length is checked against the file's size before use, so a damaged or hostile file costs time and memory in
proportion to its size. ``gguf.GGUFReader`` makes several numpy objects of each item, which takes seconds for a
vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

_VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q")  # of a text, in bytes
_STRING, _ARRAY = 8, 9
#: Fixed-size types of metadata → ``struct`` formats.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_ITEMS = 1 << 24  # of an array; the largest vocabularies have 2^18 tokens
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file.

    Args:
        tensor_type: a ``gguf.GGMLQuantizationType``.
        shape: in llama.cpp's order, the width of a row first.
        data: mapped numbers in rows, or the bytes of the rows' blocks.
    """

    name: str
    tensor_type: Any
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a file: ``metadata`` (numbers, texts and lists by key), and ``tensors`` by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Read a file's header and map its tensors. Raises ValueError with the reason, ImportError without ``gguf``."""
    from gguf import GGUFReader as _  # noqa: F401  # a missing package is told before anything is read

    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise ValueError(f"it has {size} bytes, and a header alone has 24")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = _Cursor(mapped, size)
            metadata, count = _metadata(cursor)
            entries = [_entry(cursor) for _ in range(count)]
            end = cursor.at
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, which is no power of two")
    # Copy-on-write, because torch needs writable memory. Nothing writes to it.
    data = np.memmap(path, dtype=np.uint8, mode="c")
    first = -(-end // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"it holds two tensors named {name}")
        tensors[name] = _tensor(data, name, shape, kind, first + offset)
    return GGUFHeader(metadata, tensors)


class _Cursor:
    """Reads a mapped file sequentially. ``at`` is the next byte."""

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        self._mapped, self._size, self.at = mapped, size, 0

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """Read little-endian numbers of one type."""
        end = self.at + count * struct.calcsize(f"<{form}")
        if end > self._size:
            raise ValueError("its header is cut short")
        found = struct.unpack_from(f"<{count}{form}", self._mapped, self.at)
        self.at = end
        return found

    def text(self) -> str:
        """Read a length and a text."""
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Read many texts: a vocabulary or its merges."""
        mapped, size, at = self._mapped, self._size, self.at
        found = []
        for _ in range(count):
            first = at + _LENGTH.size
            at = first + _LENGTH.unpack_from(mapped, at)[0] if first <= size else size + 1
            if at > size:
                raise ValueError("its header is cut short")
            found.append(mapped[first:at])
        self.at = at
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError:
            raise ValueError("a text of its header is not UTF-8") from None

    def left(self) -> int:
        """Return the number of bytes behind this place."""
        return self._size - self.at


def _metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """Read the metadata. Returns it with the number of tensors that follow."""
    magic, version = cursor.numbers("I", 2)
    if magic != int.from_bytes(b"GGUF", "little"):
        raise ValueError("it does not begin with GGUF")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError("it is big-endian" if swapped else f"it is of version {version}, and 2 and 3 are read")
    tensors, count = cursor.numbers("Q", 2)
    if count > cursor.left() or tensors > cursor.left():
        raise ValueError("its header is cut short")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it says {key} twice")
        (kind,) = cursor.numbers("I")
        metadata[key] = _value(cursor, key, kind)
    return metadata, tensors


def _value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind in _FORMATS:
        return cursor.numbers(_FORMATS[kind])[0]
    if kind != _ARRAY:
        raise ValueError(f"{key} is of the type {kind}, which GGUF does not have")
    (of,) = cursor.numbers("I")
    (count,) = cursor.numbers("Q")
    if of != _STRING and of not in _FORMATS:
        raise ValueError(f"{key} is an array of the type {of}, which is not read")
    if count > min(_MOST_ITEMS, cursor.left()):
        raise ValueError(f"{key} has {count:,} items, more than the file or a vocabulary can hold")
    return cursor.texts(count) if of == _STRING else list(cursor.numbers(_FORMATS[of], count))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read a tensor's name, shape, type and offset."""
    name = cursor.text()
    (dimensions,) = cursor.numbers("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are read")
    shape = cursor.numbers("Q", dimensions)
    (kind,) = cursor.numbers("I")
    (offset,) = cursor.numbers("Q")
    return name, shape, kind, offset


def _tensor(data: np.ndarray[Any, Any], name: str, shape: tuple[int, ...], number: int, first: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"{name} is of the type {number}, which the package gguf does not know") from None
    weights, size = GGML_QUANT_SIZES[kind]
    if shape[0] % weights:
        raise ValueError(f"{name} has rows of {shape[0]} weights, which are no whole blocks of {weights}")
    length = prod(shape) // weights * size
    if first + length > len(data):
        raise ValueError(f"{name} ends behind the end of the file")
    held = data[first : first + length]
    number_type = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(kind.name)
    rows = tuple(reversed(shape[1:]))
    if number_type is not None:
        held = held.view(number_type).reshape(*rows, shape[0])
    else:
        held = held.reshape(*rows, shape[0] // weights * size)
    return GGUFTensor(name, kind, shape, held)
