"""The disk tier: a folder with one file per segment, which several processes may share."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from inlay.errors import ParameterError
from inlay.kv.identity import LOSSLESS
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.disk_index import DiskIndex, split_labels
from inlay.kv.offload.form import (
    FORM,
    FileSource,
    UnknownFormError,
    append_labels,
    read_header,
    read_segment,
    read_slabs,
    remove_drafts,
    size_of,
    write_file,
)
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import Miss, Tier, TierCounts, TierEntries, TierEntry, TierMissError
from inlay.kv.policies import PassCost, Policy, lru
from inlay.types import TierStats
from inlay.whole_file import sync_folder
from inlay.wording import fault_in_words

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_LABELS = ".labels"  # of a file beside a segment's: the labels that were added to it, which outlive the index
LOOK_S = 1.0  # between two looks for other processes' changes
_RETRY_S = 30.0  # no writes after the system has refused one
LOCK_S = 2.0  # the longest wait for another process that evicts
_MOST_PROFILES = 4096  # of segments that are not written yet; the oldest go first
MOST_USES = 256  # Uses that are kept in memory. More are written at once, fewer on refresh.


class DiskTier(Tier):
    """Segments in files of a folder. ``get``, ``put`` and ``delete`` may be called from any thread.

    Args:
        quota: the most bytes that the files may take.
        codec: segments from the pool are written through it. Files of any codec are read.
        policy, cost: choose the first segments to evict. Pinned ones are never evicted.

    Raises:
        ParameterError: the folder can be neither created nor read.
    """

    name = "disk"

    def __init__(
        self, folder: Path, quota: int, codec: str = LOSSLESS, policy: Policy = lru, cost: PassCost | None = None
    ) -> None:
        self.folder = folder / f"v{FORM}"
        self.quota = quota
        self.codec = codec
        self._lock = threading.Lock()
        self._entries = TierEntries(policy, cost)  # the entries that are believed to exist; guarded by the lock
        self._uses: list[tuple[bytes, float]] = []  # not yet in the index
        self._counts = TierCounts()
        self._no_writes_until = 0.0
        self._seen = (0.0, -1)  # time of the last look at others' changes, and SQLite's data version then
        # By key, the lossless key and the profile of segments that are not written yet. Guarded by the lock.
        self._profiles: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._last_change = 0  # the number of the last row change seen
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.listdir(self.folder)
        except OSError as error:
            raise ParameterError(
                f"the store {folder} cannot be used ({error.strerror}); give another folder, or 'off' for none",
                code="cache.unusable_store",
            ) from None
        self._index = DiskIndex(self.folder / "index.sqlite")
        self.reconcile()

    def holds(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
        try:
            with self._opened(asked.key, whole=True) as file:
                read_segment(file, asked, take, late)
        except TierMissError as miss:
            self._missed(asked.key, miss)
            raise
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            failure = TierMissError(Miss.ABSENT if missing else Miss.FAILED, str(error))
            self._missed(asked.key, failure)
            raise failure from None
        self._hit(asked)

    def put(self, record: SegmentRecord, slabs: Iterable[Slab]) -> bool:
        if self._is_known(record) or time.monotonic() < self._no_writes_until:
            return self.holds(record.key)
        try:
            if not self._make_room(size_of(record)):
                self._counts.add(refused=1)
                return False
            written = write_file(self.folder, record.key.hex() + _SUFFIX, record, slabs)
        except OSError as error:
            self._counts.add(refused=1)
            self._no_writes_until = time.monotonic() + _RETRY_S
            logger.warning("segments are not written to %s for a while: %s", self.folder, error)
            return False
        entry = self._entry(record, written, time.time())
        self._index.add([entry])
        with self._lock:
            self._entries.note(entry)
            profile = self._profiles.pop(record.key, None)
        if profile is not None:
            self._index.add_profile(record.key, *profile)
        self._counts.add(writes=1, written_bytes=written)
        return True

    def _is_known(self, record: SegmentRecord) -> bool:
        """True if a segment has a file. One of another process gets the record's labels."""
        if self.holds(record.key):
            return True
        entry = self._index.entry(record.key)
        if entry is None or not self._path(record.key).exists():
            return False
        with self._lock:
            self._entries.note(entry)
        self.add_labels(record.key, record.labels)
        return True

    def add_profile(self, key: bytes, lossless: bytes, deviations: bytes) -> None:
        """Store a segment's deviation profile until the segment's file is removed.

        Args:
            key: of the segment in the form of this tier.
            lossless: the key of the segment as computed.
            deviations: the numbers of all tokens, fp16.
        """
        with self._lock:
            self._profiles[key] = lossless, deviations  # for a segment that is still to be written
            while len(self._profiles) > _MOST_PROFILES:
                self._profiles.popitem(last=False)
        if self.holds(key):
            with self._lock:
                self._profiles.pop(key, None)
            self._index.add_profile(key, lossless, deviations)

    def profiles(self, fingerprint: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the lossless keys and deviation profiles of a model's segments, least recently used first."""
        return self._index.profiles(fingerprint)

    def delete(self, key: bytes) -> bool:
        known = self.drop(key)
        self._index.end([key])
        with self._lock:
            self._profiles.pop(key, None)
        return known

    def drop(self, key: bytes) -> bool:
        """Remove a segment's file and row.

        Returns True if there was a file. A segment written again keeps its lifetime.
        """
        with self._lock:
            known = self._entries.remove(key)
        try:
            self._path(key).unlink()
            known = True
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s cannot be removed (%s); remove it yourself", self._path(key), error.strerror)
        with suppress(OSError):
            self._labels_path(key).unlink()
        self._index.remove([key])
        return known

    def expire(self, key: bytes, ttl_s: float) -> None:
        self._index.expire(key, ttl_s, time.time())

    def left_s(self, key: bytes) -> float | None:
        ends = self._index.ends(key)
        return None if ends is None or ends == math.inf else max(0.0, ends - time.time())

    def pin(self, key: bytes, pinned: bool) -> None:
        """Set or clear the protection of a segment from eviction."""
        self._index.pin(key, pinned)
        with self._lock:
            if key in self._entries:
                self._entries.note(replace(self._entries[key], pinned=pinned))

    def record(self, key: bytes) -> SegmentRecord:
        """The record in the header of a segment's file. Raises TierMissError and OSError."""
        with self._opened(key) as file:
            return read_header(file)[0].record

    def verify(self, key: bytes) -> None:
        """Read and check a whole file. Raises TierMissError or OSError if it is damaged or unreadable."""
        with self._opened(key, whole=True) as file:
            header, at = read_header(file)
            if header.record.key != key:
                raise TierMissError(Miss.CORRUPT, "it holds another segment than its name says")
            read_slabs(file, header, at, lambda layer, slab: None, lambda: False)

    def verify_all(self) -> Iterator[str | None]:
        """Read every file and remove damaged ones. Yields the fault of each file, None if it is sound."""
        for entry in list(self.iterate()):
            try:
                self.verify(entry.key)
                yield None
            except (TierMissError, OSError) as error:
                gone = isinstance(error, TierMissError) and error.reason is Miss.CORRUPT and self.drop(entry.key)
                why = fault_in_words(error) if isinstance(error, OSError) else error
                yield f"{entry.key.hex()}: {why}{'; removed' if gone else ''}"

    def adopt(self, draft: Path) -> SegmentRecord:
        """Check a draft (``new_draft``) that came from elsewhere, and store it under its own name.

        Raises:
            TierMissError: it is damaged, or there is no room.
            OSError: it cannot be read or renamed.
        """
        file = os.open(draft, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            source = FileSource(file, whole=True)
            header, at = read_header(source)
            read_slabs(source, header, at, lambda layer, slab: None, lambda: False)
            size = source.size
            os.fsync(file)
        finally:
            os.close(file)
        record = header.record
        if not self.holds(record.key) and not self._make_room(size):
            raise TierMissError(Miss.FAILED, f"there is no room for its {size} bytes beside what is pinned")
        os.rename(draft, self._path(record.key))
        sync_folder(self.folder)
        entry = self._entry(record, size, time.time())
        self._index.add([entry])
        with self._lock:
            self._entries.note(entry)
        return record

    def path(self, key: bytes) -> Path:
        """The path of a segment's file, whether or not it exists."""
        return self._path(key)

    def iterate(self) -> Iterator[TierEntry]:
        self._note_uses()
        return iter(self._index.entries())

    def labelled(self, labels: Iterable[bytes]) -> list[TierEntry]:
        with self._lock:
            return self._entries.labelled(labels)

    def add_labels(self, key: bytes, labels: Iterable[bytes]) -> None:
        with self._lock:
            entry = self._entries.get(key)
            added = [] if entry is None else [label for label in dict.fromkeys(labels) if label not in entry.labels]
            if entry is None or not added:
                return
            self._entries.note(replace(entry, labels=(*entry.labels, *added)))
        try:
            append_labels(self._labels_path(key), added)
        except OSError as error:
            logger.warning("%s cannot be written (%s)", self._labels_path(key), error.strerror)
        self._index.add_labels(key, added)

    def stats(self) -> TierStats:
        with self._lock:
            entries = list(self._entries.values())
        return self._counts.stats(entries, quota=self.quota)

    def held_of(self, fingerprint: bytes) -> tuple[int, int, int]:
        """The number of segments, tokens and bytes of one model. Other models may share the folder."""
        with self._lock:
            mine = [entry for entry in self._entries.values() if entry.fingerprint == fingerprint]
        return len(mine), sum(entry.tokens for entry in mine), sum(entry.size for entry in mine)

    @property
    def has_room(self) -> bool:
        return 2 * self._entries.evictable_bytes <= self.quota

    def close(self) -> None:
        self._note_uses()
        self._index.close()

    def reconcile(self) -> None:
        """Make the index match the files: add missing rows, remove rows without a file."""
        sizes = self._files()
        with suppress(OSError):
            remove_drafts(self.folder)
            for path in self.folder.glob(f"*{_LABELS}"):
                if not path.with_suffix(_SUFFIX).exists():
                    path.unlink(missing_ok=True)
        self._index.forget_changes()
        self._last_change = self._index.last_change()
        rows = {entry.key: entry for entry in self._index.entries()}
        self._index.remove([key for key in rows if key not in sizes])
        found: list[TierEntry] = []
        for key, (size, changed) in sizes.items():
            if key in rows and rows[key].size == size:
                continue
            try:
                record = self.record(key)
            except (TierMissError, OSError) as error:
                self._discard(key, error)
                rows.pop(key, None)
                continue
            found.append(self._entry(record, size, changed))
        self._index.add(found)
        entries = {key: rows[key] for key in sizes if key in rows} | {entry.key: entry for entry in found}
        with self._lock:
            self._entries.begin(entries.values())
        self._drop_expired()
        self._seen = (time.monotonic(), self._index.changes())

    def _drop_expired(self) -> None:
        for key in self._index.expired(time.time()):
            self.delete(key)

    def refresh(self) -> None:
        """Read other processes' writes and removals from the index, at most once a second. Writes own uses to it."""
        if time.monotonic() - self._seen[0] < LOOK_S:
            return
        self._note_uses()
        self._drop_expired()
        self._look()

    def _look(self) -> bool:
        """Read other processes' changes from the index. Returns True if there were any.

        The cost grows with the number of changes. Other processes' uses are read only for eviction (``_victims``).
        """
        changes = self._index.changes()
        changed = changes != self._seen[1]
        if changed:
            with self._lock:  # a row of a concurrent put is there already or is noted after this
                found = self._index.changed_since(self._last_change)
                if found is None:
                    self._last_change = self._index.last_change()
                    self._entries.replace(self._index.entries())
                else:
                    self._last_change, rows = found
                    self._entries.change(rows)
        self._seen = (time.monotonic(), changes)
        return changed

    # Files

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{_SUFFIX}"

    def _labels_path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{_LABELS}"

    def _entry(self, record: SegmentRecord, size: int, at: float) -> TierEntry:
        """The entry of a segment's file, with the labels that were added to it."""
        entry = TierEntry.of(record, size, at)
        with suppress(OSError):
            added = split_labels(self._labels_path(record.key).read_bytes())
            entry = replace(entry, labels=tuple(dict.fromkeys((*entry.labels, *added))))
        return entry

    @contextmanager
    def _opened(self, key: bytes, *, whole: bool = False) -> Iterator[FileSource]:
        file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            yield FileSource(file, whole=whole)
        finally:
            os.close(file)

    def _files(self) -> dict[bytes, tuple[int, float]]:
        """Size and modification time of every file whose name is a key."""
        found = {}
        with suppress(OSError), os.scandir(self.folder) as files:
            for file in files:
                with suppress(OSError, ValueError):
                    key = bytes.fromhex(file.name.removesuffix(_SUFFIX))
                    if file.name.endswith(_SUFFIX) and len(key) == 32 and file.is_file(follow_symlinks=False):
                        stat = file.stat(follow_symlinks=False)
                        found[key] = stat.st_size, stat.st_mtime
        return found

    # Hits and misses

    def _hit(self, asked: SegmentRecord) -> None:
        now = time.time()
        self._counts.add(hits=1, hit_tokens=asked.tokens)
        with self._lock:
            self._uses.append((asked.key, now))
            if asked.key in self._entries:
                entry = self._entries[asked.key]
                self._entries.note(replace(entry, used=max(now, entry.used), uses=entry.uses + 1))
            many = len(self._uses) >= MOST_USES
        if many:
            self._note_uses()

    def _missed(self, key: bytes, miss: TierMissError) -> None:
        self._counts.missed(miss.reason)
        if miss.reason is not Miss.LATE:
            with self._lock:
                self._entries.remove(key)
        if miss.reason is Miss.ABSENT and not isinstance(miss, UnknownFormError):
            self._index.remove([key])
        elif miss.reason is not Miss.LATE:
            self._discard(key, miss)

    def _discard(self, key: bytes, reason: Exception) -> None:
        """Log the fault of a file, remove its row, and unlink the file if it is damaged."""
        logger.warning("%s is not used: %s", self._path(key), reason)
        if isinstance(reason, TierMissError) and reason.reason is Miss.CORRUPT:
            with suppress(OSError):
                self._path(key).unlink()
        self._index.remove([key])

    def _note_uses(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, []
        self._index.used(uses)

    # Room

    def _make_room(self, size: int) -> bool:
        """Evict until this many bytes fit into the quota. Returns True if they fit. One process evicts at a time."""
        if self._index.total_bytes() + size <= self.quota:
            return True
        if size > self.quota:
            return False
        with self.evicting() as mine:
            if not mine:
                return False
            self._note_uses()
            over = self._index.total_bytes() + size - self.quota
            victims = self._victims(over)
            if not victims and over > 0 and self._look():
                victims = self._victims(over)
            now = time.time()
            for entry in victims:
                with self._lock:
                    self._entries.evicted(entry)
                self.drop(entry.key)
            self._counts.evicted(max(0.0, now - entry.used) for entry in victims)
        return bool(victims) or over <= 0

    def _victims(self, over: int) -> list[TierEntry]:
        """Return the first segments to evict to free ``over`` bytes. Empty if all evictable segments take less.

        The cost grows with the number of victims, not of files. The index holds the uses and pins of other processes
        too.
        """
        victims: list[TierEntry] = []
        with self._lock:
            entry = self._entries.take() if self._entries.evictable_bytes >= over > 0 else None
        while entry is not None:
            row = self._index.entry(entry.key)
            with self._lock:
                if row is not None and (row.pinned or (row.used, row.uses) > (entry.used, entry.uses)):
                    self._entries.note(row)
                elif row is None and not self._path(entry.key).exists():
                    self._entries.remove(entry.key)
                else:
                    victims.append(entry)
                    over -= entry.size
                if over <= 0:
                    return victims
                entry = self._entries.take()
        with self._lock:
            for victim in victims:
                self._entries.note(victim)
        return []

    @contextmanager
    def evicting(self) -> Iterator[bool]:
        """Lock eviction against other processes. Yields False if the lock is not free in time. It ends with its
        process.
        """
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        yield False
                        return
                    time.sleep(0.01)
            yield True
        finally:
            os.close(file)
