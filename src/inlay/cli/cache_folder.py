"""``inlay cache`` on a folder: the store on disk, with or without a process that uses it."""

from __future__ import annotations

import errno
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from inlay.cli.cache_source import SHOWN, CacheSource, RefusedFileError, Row
from inlay.errors import ParameterError
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.files import new_draft, write_all
from inlay.kv.offload.tier import TierEntry, TierMissError


class FolderCache(CacheSource):
    """The store on disk. ``tier`` is open, and its opener closes it."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self.place = tier.folder.parent

    def rows(self) -> list[Row]:
        """Return all segments, the least recently used first."""
        return [_row(entry) for entry in self._tier.iterate()]

    def table(self, rows: Iterable[Row]) -> Iterator[str]:
        yield f"{'key':{SHOWN}}  {'tokens':>7}  {'MiB':>8}  {'codec':5}  {'uses':>5}  {'last used':16}  model"
        for row in rows:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(0, row["used"])))
            pin = "  (pinned)" if row["pinned"] else ""
            yield (
                f"{row['key'][:SHOWN]}  {row['tokens']:7,}  {row['bytes'] / 2**20:8.1f}  {row['codec']:5}  "
                f"{row['uses']:5,}  {used:16}  {row['model']}{pin}"
            )

    def describe(self, row: Row) -> dict[str, Any]:
        record = self._tier.record(_key(row))
        said = record.to_json() | {"ids": list(record.ids), "context": record.context.hex()}
        del said["before"]
        return {**row, **said}

    def pin(self, row: Row, pinned: bool) -> None:
        self._tier.pin(_key(row), pinned)

    def evict(self, row: Row) -> None:
        self._tier.delete(_key(row))

    def verify(self, tell: Callable[[str], object]) -> tuple[int, int]:
        whole = damaged = 0
        for problem in self._tier.verify_all():
            if problem is None:
                whole += 1
            else:
                damaged += 1
                tell(problem)
        return whole, damaged

    def stats(self) -> dict[str, Any]:
        """Return totals by model, and by codec for each model."""
        models: dict[str, dict[str, int]] = {}
        codecs: dict[str, dict[str, dict[str, int]]] = {}
        for row in self.rows():
            of_model = models.setdefault(row["model"], {"segments": 0, "tokens": 0, "bytes": 0, "uses": 0, "pinned": 0})
            by_codec = codecs.setdefault(row["model"], {})
            of_codec = by_codec.setdefault(row["codec"], {"segments": 0, "tokens": 0, "bytes": 0})
            for name, value in (("segments", 1), ("tokens", row["tokens"]), ("bytes", row["bytes"])):
                of_model[name] += value
                of_codec[name] += value
            of_model["uses"] += row["uses"]
            of_model["pinned"] += row["pinned"]
        return {"folder": str(self._tier.folder), "models": models, "codecs": codecs}

    def summary(self, stats: Row) -> Iterator[str]:
        yield stats["folder"]
        for model, row in stats["models"].items():
            yield (
                f"{model}: {row['segments']:,} segments ({row['pinned']:,} pinned), {row['tokens']:,} tokens, "
                f"{row['bytes'] / 2**20:,.1f} MiB, read {row['uses']:,} times"
            )
            for codec, part in stats["codecs"][model].items():
                if codec != "none":
                    size = f"{part['tokens']:,} tokens, {part['bytes'] / 2**20:,.1f} MiB"
                    yield f"  of these as {codec}: {part['segments']:,} segments, {size}"

    def export(self, rows: Iterable[Row], draft: Path) -> int:
        files = [self._tier.path(_key(row)) for row in rows]
        with tarfile.open(draft, "w") as archive:
            for file in files:
                archive.add(file, file.name, recursive=False)
        return len(files)

    def check_takes(self) -> None:
        """Do nothing: a folder takes every intact file."""

    def take(self, content: IO[bytes], size: int) -> None:
        with _writing(self._tier.folder), new_draft(self._tier.folder) as (draft, file):
            while block := content.read(1 << 20):
                write_all(file, memoryview(block))
            try:
                self._tier.adopt(draft)
            except TierMissError as error:
                raise RefusedFileError(str(error)) from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Return the reason why the folder cannot be written, as one sentence. Failed reads are other errors."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        remedy = "make room there, or give another --store"
        raise ParameterError(f"{folder}: cannot be written ({error.strerror}); {remedy}") from None


def _row(entry: TierEntry) -> dict[str, Any]:
    return {
        "key": entry.key.hex(),
        "model": entry.model,
        "tokens": entry.tokens,
        "bytes": entry.size,
        "codec": entry.codec.rpartition(" ")[2],  # the index stores it behind the KV dtype
        "created": entry.created,
        "used": entry.used,
        "uses": entry.uses,
        "pinned": entry.pinned,
    }


def _key(row: Row) -> bytes:
    return bytes.fromhex(row["key"])
