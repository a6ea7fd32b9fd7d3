"""The texts of marked parts by their hashes, so that a later call can name a text without sending it."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from heapq import heapify, heappop, heapreplace

#: The size of the table.
MAX_BYTES = 64 << 20
_ENTRY_BYTES = 256  # of one text beside its characters
_SPARE = 32  # a full table drops this part of itself: 1 / _SPARE
_HASH = re.compile(r"[0-9a-f]{64}")


def text_hash(text: str) -> str:
    """Return the sha256 of a text's UTF-8 bytes, in 64 hexadecimal digits."""
    return sha256(text.encode(errors="surrogatepass")).hexdigest()


def is_hash(value: object) -> bool:
    """True for 64 hexadecimal digits in lower case."""
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


class SeenTexts:
    """The texts of each salt, in bounded memory. Thread-safe.

    A full table drops the least recent texts of the salts with the largest parts of it. It drops some more than needed,
    because each time it compares all salts.

    Args:
        max_bytes: the size of the table.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: dict[str, OrderedDict[str, str]] = {}  # salt → hash → text, the most recent last
        self._sizes: dict[str, int] = {}  # by salt
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The size of the table's contents."""
        return self._bytes

    def note(self, salt: str, texts: Iterable[str]) -> None:
        """Record texts that a request with this salt has."""
        hashed = [(text_hash(text), text) for text in texts]
        with self._lock:
            for digest, text in hashed:
                mine = self._texts.setdefault(salt, OrderedDict())
                if mine.pop(digest, None) is None:
                    self._grow(salt, _size(text))
                mine[digest] = text
                if self._bytes > self._max_bytes:
                    self._shrink()

    def find(self, salt: str, hashes: Sequence[str]) -> list[str | None]:
        """Return the texts of this salt with these hashes. None for an unknown one."""
        with self._lock:
            mine = self._texts.get(salt)
            return [None if mine is None else mine.get(digest) for digest in hashes]

    def forget(self, salt: str) -> None:
        """Drop the texts of a salt."""
        with self._lock:
            self._texts.pop(salt, None)
            self._bytes -= self._sizes.pop(salt, 0)

    def _grow(self, salt: str, size: int) -> None:
        self._sizes[salt] = self._sizes.get(salt, 0) + size
        self._bytes += size

    def _shrink(self) -> None:
        heap = [(-size, salt) for salt, size in self._sizes.items()]
        heapify(heap)
        most = self._max_bytes - self._max_bytes // _SPARE
        while self._bytes > most:
            salt = heap[0][1]
            mine = self._texts[salt]
            _, text = mine.popitem(last=False)
            self._grow(salt, -_size(text))
            if mine:
                heapreplace(heap, (-self._sizes[salt], salt))
            else:
                heappop(heap)
                del self._texts[salt], self._sizes[salt]


def _size(text: str) -> int:
    return 4 * len(text) + _ENTRY_BYTES  # a character takes up to four bytes
