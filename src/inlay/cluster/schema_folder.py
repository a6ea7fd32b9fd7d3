"""Schemas in a folder. They survive an ingress and are shared by several.

Each schema is one JSON file with a checksum, written to a temporary file, synced and renamed. A damaged file is
skipped with a warning. A writer locks the folder and compares versions, so one of two simultaneous changes is
rejected. The file ``revision`` is replaced with every change, so one stat call finds out if anything changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inlay.errors import ParameterError
from inlay.server.schema_record import KeptSchema, SchemaVersion
from inlay.whole_file import replace_file

logger = logging.getLogger(__name__)

_VERSION = 1
_MOST_BYTES = 64 * 2**20
_MOST_FILES = 100_000


class SchemaFolder:
    """See SchemaKeeper.

    Args:
        folder: Created if missing, readable only by its owner because it holds tenants' cache salts.

    Raises:
        ParameterError: If the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int, int] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._changing(mark=not self._revision.exists()):
                pass
        except OSError as error:
            raise ParameterError(
                f"schemas: {folder} cannot be used ({error.strerror}); give another folder",
                code="cluster.unusable_folder",
            ) from None

    def changed(self) -> bool:
        return self._look() != self._seen

    def all(self) -> list[KeptSchema]:
        self._seen = self._look()  # first, so that a change during the reads is noticed later
        kept = []
        for path in sorted(self._folder.glob("*.json"))[:_MOST_FILES]:
            one = self._read(path)
            if one is not None:
                kept.append(one)
        return kept

    def keep(self, kept: KeptSchema) -> bool:
        with self._changing():
            before = self._read(self._path(kept))
            if before is not None and before.versions[-1] not in kept.versions[:-1]:
                return False
            if before is None and len(kept.versions) > 1:
                return False  # it was deleted elsewhere
            self._write(kept)
        return True

    def drop(self, kept: KeptSchema) -> bool:
        with self._changing():
            before = self._read(self._path(kept))
            if before is not None and before.versions[-1] != kept.versions[-1]:
                return False
            self._path(kept).unlink(missing_ok=True)
        return True

    @property
    def _revision(self) -> Path:
        return self._folder / "revision"

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._revision.stat()
        except OSError:
            return (0, 0, 0)
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _path(self, kept: KeptSchema) -> Path:
        named = json.dumps([kept.salt, kept.name]).encode()
        return self._folder / f"{hashlib.sha256(named).hexdigest()[:32]}.json"

    @contextmanager
    def _changing(self, *, mark: bool = True) -> Iterator[None]:
        """Lock the folder against all processes. The block is a change that other ingresses notice."""
        handle = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            mine = self._look() == self._seen
            yield
            if mark:
                replace_file(self._revision, secrets.token_hex(16).encode())
                if mine:  # no other process changed anything, and this change is known
                    self._seen = self._look()
        finally:
            os.close(handle)

    def _read(self, path: Path) -> KeptSchema | None:
        try:
            with path.open("rb") as file:
                said = json.loads(file.read(_MOST_BYTES))
            if said["version"] != _VERSION or said.pop("sha256") != _checksum(said):
                raise ValueError("it is damaged, or of another version")
            versions = tuple(SchemaVersion(**one) for one in said["versions"])
            names = ("name", "salt", "form", "text", "reuse", "positions")
            return KeptSchema(**{name: said[name] for name in names}, versions=versions, ttl=said.get("ttl"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s is left out: %s", path, error)
            return None

    def _write(self, kept: KeptSchema) -> None:
        said = {"version": _VERSION, **asdict(kept), "versions": [asdict(one) for one in kept.versions]}
        said["sha256"] = _checksum(said)
        replace_file(self._path(kept), json.dumps(said).encode())


def _checksum(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
