"""The changes of a store, for a router that chooses among the stores of several engines.

A segment is reported by its end: the first 8 bytes of the sha256 of the node behind it. The node is unique to the text
and its context. Text outside modules may be read up to any token, so every border of its record is reported too.

Changes are numbered. A reader asks for the changes behind the last number it knows. If it has missed too many, or has
followed another store, it gets the full contents.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from inlay.kv.identity import KeyMaker, TokenRun
from inlay.kv.pool import Segment

_KEY_BYTES = 8
_MOST_CHANGES = 65_536  # remembered changes; a reader further behind gets the full contents


def end_key(run: TokenRun, keys: KeyMaker) -> int:
    """The key of the text up to the last token of a run."""
    rest = run.rest(len(run.ids))
    return short_key(keys.place(rest.digest, rest.start))


def border_keys(run: TokenRun, keys: KeyMaker) -> Iterator[tuple[int, int]]:
    """Yield (tokens, key) for the text up to each border of a run's record."""
    for tokens, record in run.borders():
        end = run.start + tokens
        yield tokens, short_key(keys.place(record.digest(end), end))


def short_key(digest: bytes) -> int:
    """Return the first 8 bytes of a sha256 as a number: of an index node, or of a segment's key in a tier."""
    return int.from_bytes(digest[:_KEY_BYTES], "little")


@dataclass(frozen=True, slots=True)
class StoreChanges:
    """The changes of one store.

    Attributes:
        epoch: identifies the store and its process; a new store starts over.
        first, last: change numbers; ``first`` is the last number that the reader knew.
        added, removed: keys that entered or left the pool.
        below: keys in the tiers below, if they have changed; else None.
        whole: True if ``added`` is the full contents and replaces everything known before.
    """

    epoch: int
    first: int
    last: int
    added: array[int]
    removed: array[int]
    below: array[int] | None = None
    whole: bool = False


class ChangeLog:
    """Follows one store. ``added`` and ``removed`` need the engine lock; all else is thread-safe.

    Args:
        keys: the store's keys.
        most: the number of changes to remember.
    """

    def __init__(self, keys: KeyMaker, most: int = _MOST_CHANGES) -> None:
        self.epoch = secrets.randbits(62)
        self._keys = keys
        self._most = most
        self._told: dict[Segment, array[int]] = {}
        self._held: dict[int, int] = {}  # key → how many segments report it
        self._recent: deque[tuple[int, bool]] = deque(maxlen=most)
        self._last = 0
        self._below: array[int] = array("Q")
        self._below_changed = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def added(self, segment: Segment) -> None:
        """See IndexListener."""
        told = array("Q", self._keys_of(segment))
        with self._lock:
            self._told[segment] = told
            for key in told:
                count = self._held.get(key, 0)
                self._held[key] = count + 1
                if not count:
                    self._note(key, True)

    def removed(self, segment: Segment) -> None:
        """See IndexListener."""
        with self._lock:
            for key in self._told.pop(segment, ()):
                count = self._held.pop(key)
                if count > 1:
                    self._held[key] = count - 1
                else:
                    self._note(key, False)

    def set_below(self, keys: Iterable[int]) -> None:
        """Set the full list of keys in the tiers below the pool."""
        below = array("Q", sorted(keys))
        with self._lock:
            if below != self._below:
                self._below = below
                self._last += 1
                self._recent.append((0, False))  # a change without a key: it numbers the change of the tiers
                self._below_changed = self._last

    def since(self, epoch: int, number: int) -> StoreChanges:
        """Return the changes after ``number``, the last number that the reader knows.

        Args:
            epoch: the store that the reader followed; 0 for a new reader. The contents are whole for another store.
            number: its last number.
        """
        with self._lock:
            missed = self._last - number
            if epoch != self.epoch or missed < 0 or missed > len(self._recent):
                held = array("Q", self._held)
                return StoreChanges(self.epoch, 0, self._last, held, array("Q"), self._below, whole=True)
            latest: dict[int, bool] = {}
            for key, here in islice(reversed(self._recent), missed):
                latest.setdefault(key, here)
            latest.pop(0, None)
            below = self._below if self._below_changed > number else None
            added = array("Q", (key for key, here in latest.items() if here))
            removed = array("Q", (key for key, here in latest.items() if not here))
            return StoreChanges(self.epoch, number, self._last, added, removed, below)

    def _note(self, key: int, here: bool) -> None:
        self._last += 1
        self._recent.append((key, here))

    def _keys_of(self, segment: Segment) -> Iterator[int]:
        end = short_key(segment.behind)
        if not segment.module:
            for _, key in border_keys(segment.run, self._keys):
                if key != end:
                    yield key
        yield end
