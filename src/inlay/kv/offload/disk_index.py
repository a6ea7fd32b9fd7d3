"""The index of a disk tier in SQLite: sizes, uses, pins and lifetimes, shared by all processes that use the folder.

If the index is lost or damaged, all but uses, pins and lifetimes is read from the files again. A wrong row never causes
a wrong answer: every file is checked on its own.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from inlay.kv.identity import LABEL_BYTES
from inlay.kv.offload.tier import TierEntry

logger = logging.getLogger(__name__)

_VERSION = 1
_WAIT_S = 5.0  # for another process's transaction
_TABLE = """CREATE TABLE IF NOT EXISTS segments (
    key BLOB PRIMARY KEY, tokens INTEGER NOT NULL, size INTEGER NOT NULL, model TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, uses INTEGER NOT NULL, pinned INTEGER NOT NULL,
    text BLOB NOT NULL, fingerprint BLOB NOT NULL, numerics TEXT NOT NULL, codec TEXT NOT NULL, salt BLOB NOT NULL,
    context BLOB NOT NULL, private INTEGER NOT NULL, labels BLOB NOT NULL DEFAULT x''
)"""
#: For the index of an earlier version.
_LABELS = "ALTER TABLE segments ADD COLUMN labels BLOB NOT NULL DEFAULT x''"
#: Lifetimes, including those of segments that are not written yet: the end, and the time it was set, since 1970.
_LIFETIMES = """CREATE TABLE IF NOT EXISTS lifetimes (
    key BLOB PRIMARY KEY, ends REAL NOT NULL, said REAL NOT NULL
)"""
#: Deviation profiles by the key of the segment in the folder. ``lossless`` is the key of the segment as computed.
_PROFILES = (
    """CREATE TABLE IF NOT EXISTS profiles (
    key BLOB PRIMARY KEY, lossless BLOB NOT NULL, deviations BLOB NOT NULL, crc INTEGER NOT NULL
)""",
    """CREATE TRIGGER IF NOT EXISTS profile_removed AFTER DELETE ON segments
    BEGIN DELETE FROM profiles WHERE key = old.key; END""",
)
#: The bytes of all files. Triggers maintain it for every process that writes a row.
_HELD = (
    "CREATE TABLE IF NOT EXISTS held (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER NOT NULL)",
    "INSERT OR REPLACE INTO held SELECT 1, coalesce(sum(size), 0) FROM segments",
    """CREATE TRIGGER IF NOT EXISTS held_more AFTER INSERT ON segments
    BEGIN UPDATE held SET bytes = bytes + new.size; END""",
    """CREATE TRIGGER IF NOT EXISTS held_less AFTER DELETE ON segments
    BEGIN UPDATE held SET bytes = bytes - old.size; END""",
    """CREATE TRIGGER IF NOT EXISTS held_other AFTER UPDATE OF size ON segments
    BEGIN UPDATE held SET bytes = bytes + new.size - old.size; END""",
)
#: The keys of inserted, changed or deleted rows, each with the number of its last change. Uses are not changes. The
#: triggers delete before they insert: the conflict clause of an upsert would replace their own OR REPLACE.
_CHANGES = (
    "CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE)",
    """CREATE TRIGGER IF NOT EXISTS change_added AFTER INSERT ON segments
    BEGIN DELETE FROM changes WHERE key = new.key; INSERT INTO changes (key) VALUES (new.key); END""",
    """CREATE TRIGGER IF NOT EXISTS change_removed AFTER DELETE ON segments
    BEGIN DELETE FROM changes WHERE key = old.key; INSERT INTO changes (key) VALUES (old.key); END""",
    """CREATE TRIGGER IF NOT EXISTS change_other AFTER UPDATE OF size, pinned, tokens, model, codec ON segments
    BEGIN DELETE FROM changes WHERE key = new.key; INSERT INTO changes (key) VALUES (new.key); END""",
)
#: The number of changes that are kept. A process that has missed more reads all rows.
MOST_CHANGES = 2**18
#: The most lifetimes kept of segments without a file. Beyond it, those that end first are forgotten.
MOST_AWAITED = 65_536
_NAMES = [field.name for field in fields(TierEntry)]
_COLUMNS = ", ".join(_NAMES)
_FLAGS = ("pinned", "private")
_USES = ("key", "created", "used", "uses", "pinned")  # columns that files do not contain


class DiskIndex:
    """The rows of one folder. Thread-safe. A failed statement has no effect; the first failure is logged.

    Args:
        path: the database file. If it cannot be used, rows are kept in memory, for this process only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._told = False
        self._connection = self._open()

    def entries(self) -> list[TierEntry]:
        """All rows, least recently used first."""
        rows = self._ask(f"SELECT {_COLUMNS} FROM segments ORDER BY used, key")
        return [entry_of(row) for row in rows]

    def entry(self, key: bytes) -> TierEntry | None:
        """The row of a segment. None if there is none."""
        rows = self._ask(f"SELECT {_COLUMNS} FROM segments WHERE key = ?", (key,))
        return entry_of(rows[0]) if rows else None

    def total_bytes(self) -> int:
        """The bytes of all files."""
        rows = self._ask("SELECT bytes FROM held")
        return int(rows[0][0]) if rows else 0

    def add(self, entries: Iterable[TierEntry]) -> None:
        """Insert or update rows. Recorded uses and pins stay."""
        rows = [tuple(_column(entry, name) for name in _NAMES) for entry in entries]
        marks = ", ".join("?" * len(_NAMES))
        told = ", ".join(f"{name} = excluded.{name}" for name in _NAMES if name not in _USES)
        self._tell(f"INSERT INTO segments ({_COLUMNS}) VALUES ({marks}) ON CONFLICT (key) DO UPDATE SET {told}", rows)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Delete rows. Lifetimes stay."""
        self._tell("DELETE FROM segments WHERE key = ?", [(key,) for key in keys])

    def end(self, keys: Iterable[bytes]) -> None:
        """Delete lifetimes."""
        self._tell("DELETE FROM lifetimes WHERE key = ?", [(key,) for key in keys])

    def used(self, uses: Iterable[tuple[bytes, float]]) -> None:
        """Record the times of reads."""
        rows = [(at, key) for key, at in uses]
        self._tell("UPDATE segments SET used = max(used, ?), uses = uses + 1 WHERE key = ?", rows)

    def pin(self, key: bytes, pinned: bool) -> None:
        """Set or clear the protection of a segment from eviction."""
        self._tell("UPDATE segments SET pinned = ? WHERE key = ?", [(int(pinned), key)])

    def expire(self, key: bytes, ttl_s: float, now: float) -> None:
        """Let a segment expire after this many seconds. Of several calls the latest end counts."""
        self._tell(
            "INSERT INTO lifetimes VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE "
            "SET ends = excluded.ends, said = excluded.said WHERE excluded.ends > ends",
            [(key, now + ttl_s, now)],
        )

    def add_labels(self, key: bytes, labels: Iterable[bytes]) -> None:
        """Add labels to a segment. Other processes see them, because a pin counts as a change of its row."""
        self._tell(
            "UPDATE segments SET labels = CAST(labels || ? AS BLOB), pinned = pinned "
            "WHERE key = ? AND instr(labels, ?) = 0",
            [(label, key, label) for label in labels],
        )

    def ends(self, key: bytes) -> float | None:
        """The end of a segment's lifetime in seconds since 1970. None if it has none."""
        rows = self._ask("SELECT ends FROM lifetimes WHERE key = ?", (key,))
        return float(rows[0][0]) if rows else None

    def expired(self, now: float) -> list[bytes]:
        """The keys of expired segments. A clock that was set back does not prolong a lifetime."""
        self._tell("UPDATE lifetimes SET ends = ? + ends - said, said = ? WHERE said > ?", [(now, now, now)])
        self._tell(
            "DELETE FROM lifetimes WHERE key IN (SELECT key FROM lifetimes WHERE key NOT IN "
            "(SELECT key FROM segments) ORDER BY ends DESC LIMIT -1 OFFSET ?)",
            [(MOST_AWAITED,)],
        )
        return [bytes(row[0]) for row in self._ask("SELECT key FROM lifetimes WHERE ends <= ?", (now,))]

    def add_profile(self, key: bytes, lossless: bytes, deviations: bytes) -> None:
        """Store a segment's deviation profile. Does nothing if the segment has no row.

        Deleting the row deletes the profile.
        """
        row = (key, lossless, deviations, zlib.crc32(lossless + deviations), key)
        self._tell(
            "INSERT OR REPLACE INTO profiles SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM segments WHERE key = ?)",
            [row],
        )

    def profiles(self, fingerprint: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the lossless keys and the profiles of a model's segments, least recently used first.

        Damaged profiles, or profiles of another length than their segment, are left out.
        """
        rows = self._ask(
            "SELECT lossless, deviations, crc, tokens FROM profiles JOIN segments USING (key) "
            "WHERE fingerprint = ? ORDER BY used",
            (fingerprint,),
        )
        for row in rows:
            lossless, deviations = bytes(row["lossless"]), bytes(row["deviations"])
            if len(deviations) == 2 * row["tokens"] and zlib.crc32(lossless + deviations) == row["crc"]:
                yield lossless, deviations

    def last_change(self) -> int:
        """The number of the last row change."""
        rows = self._ask("SELECT coalesce(max(number), 0) FROM changes")
        return int(rows[0][0]) if rows else 0

    def changed_since(self, number: int) -> tuple[int, dict[bytes, TierEntry | None]] | None:
        """Return the row changes after change ``number``.

        Returns:
            The number of the last change, and the present row of each changed key, None if it was deleted. If too many
            changes were missed, None instead of both: then read all rows.
        """
        last = self.last_change()
        if last - number > MOST_CHANGES:
            return None
        names = ", ".join(f"segments.{name}" for name in _NAMES[1:])
        rows = self._ask(
            f"SELECT changes.key, {names} FROM changes LEFT JOIN segments ON segments.key = changes.key "
            "WHERE number > ? AND number <= ?",
            (number, last),
        )
        return last, {bytes(row["key"]): None if row["size"] is None else entry_of(row) for row in rows}

    def forget_changes(self) -> None:
        """Delete all but the last MOST_CHANGES changes."""
        self._tell("DELETE FROM changes WHERE number <= ?", [(self.last_change() - MOST_CHANGES,)])

    def changes(self) -> int:
        """A number that differs after another process has changed the database."""
        rows = self._ask("PRAGMA data_version")
        return int(rows[0][0]) if rows else 0

    def close(self) -> None:
        with self._lock, suppress(sqlite3.Error):
            self._connection.close()

    def _open(self) -> sqlite3.Connection:
        for attempt in range(2):
            try:
                with suppress(OSError):  # readable by the user only, as are SQLite's other files
                    os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                return self._connect(str(self._path))
            except sqlite3.DatabaseError as error:
                damaged = not isinstance(error, sqlite3.OperationalError)
                if not damaged or attempt:
                    logger.warning("the index of %s cannot be used (%s); one in memory is", self._path.parent, error)
                    break
                logger.warning("the index of %s is damaged (%s); a new one is made", self._path.parent, error)
                for suffix in ("", "-wal", "-shm"):
                    with suppress(OSError):
                        Path(f"{self._path}{suffix}").unlink()
        return self._connect(":memory:")

    def _connect(self, name: str) -> sqlite3.Connection:
        """Raises sqlite3.DatabaseError."""
        connection = sqlite3.connect(name, timeout=_WAIT_S, check_same_thread=False, isolation_level=None)
        connection.row_factory = sqlite3.Row
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute("PRAGMA journal_mode = WAL")
                cursor.execute("PRAGMA synchronous = NORMAL")
                if cursor.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                    raise sqlite3.DatabaseError("its check fails")
                (version,) = cursor.execute("PRAGMA user_version").fetchone()
                if version not in (0, _VERSION):
                    raise sqlite3.OperationalError(f"it is of version {version}, and this inlay has {_VERSION}")
                cursor.execute(_TABLE)
                cursor.execute(_LIFETIMES)
                cursor.execute("BEGIN IMMEDIATE")
                if "labels" not in [row["name"] for row in cursor.execute("PRAGMA table_info(segments)")]:
                    cursor.execute(_LABELS)
                for statement in (*_HELD, *_CHANGES, *_PROFILES):
                    cursor.execute(statement)
                cursor.execute("COMMIT")
                cursor.execute(f"PRAGMA user_version = {_VERSION}")
                cursor.execute(f"SELECT {_COLUMNS} FROM segments LIMIT 1").fetchall()
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return []

    def _tell(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if not rows:
            return
        try:
            with self._lock:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    self._connection.executemany(sql, rows)
                    self._connection.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            self._failed(error)

    def _failed(self, error: sqlite3.Error) -> None:
        if not self._told:
            self._told = True
            logger.warning("the index of %s cannot be written (%s); files stay without rows", self._path.parent, error)


def entry_of(row: sqlite3.Row) -> TierEntry:
    labels = split_labels(row["labels"])
    return TierEntry(**{**dict(row), **{name: bool(row[name]) for name in _FLAGS}, "labels": labels})


def split_labels(joined: bytes) -> tuple[bytes, ...]:
    """The labels in their joined form. An incomplete one at the end is left out."""
    return tuple(joined[at : at + LABEL_BYTES] for at in range(0, len(joined) - LABEL_BYTES + 1, LABEL_BYTES))


def _column(entry: TierEntry, name: str) -> Any:
    """The value of an entry's column."""
    return b"".join(entry.labels) if name == "labels" else getattr(entry, name)
