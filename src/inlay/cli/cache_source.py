"""The segments that ``inlay cache`` shows and changes: in a folder, with or without a process that uses it, or on a
running server over HTTP, with a tenant's key.
"""

from __future__ import annotations

import errno
import json
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode, urlsplit

from inlay.errors import ParameterError
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.form import new_draft, write_all
from inlay.kv.offload.tier import TierEntry, TierMissError

Row = Mapping[str, Any]
"""A segment: at least its key in hex, "tokens", "bytes", "codec", "uses" (or None) and "pinned"."""

SHOWN = 12  # characters of a key


class RefusedFileError(Exception):
    """A file is damaged, or is no segment for this store. The message has the reason."""


class CacheSource(ABC):
    """The segments of a folder or of a running server. ``place`` is the folder; None for a server."""

    place: Path | None = None

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return all segments."""

    @abstractmethod
    def table(self, rows: Iterable[Row]) -> Iterator[str]:
        """Return segments as lines of text below a heading."""

    @abstractmethod
    def describe(self, row: Row) -> Row:
        """Return all stored details of a segment."""

    @abstractmethod
    def pin(self, row: Row, pinned: bool) -> None:
        """Pin or unpin a segment."""

    @abstractmethod
    def evict(self, row: Row) -> None:
        """Remove a segment, even a pinned one."""

    def evict_all(self) -> tuple[int, int, int]:
        """Remove all segments; returns how many, their bytes, and how many the caller may not remove."""
        rows = self.rows()
        for row in rows:
            self.evict(row)
        return len(rows), sum(row["bytes"] for row in rows), 0

    @abstractmethod
    def verify(self, tell: Callable[[str], object]) -> tuple[int, int]:
        """Read every file, and report and remove damaged ones. Returns the numbers of intact and damaged files."""

    @abstractmethod
    def stats(self) -> Row:
        """Return totals."""

    @abstractmethod
    def summary(self, stats: Row) -> Iterator[str]:
        """Return totals as lines of text."""

    @abstractmethod
    def export(self, rows: Iterable[Row], draft: Path) -> int:
        """Write the files of segments into a tar file; returns their number. Raises OSError."""

    @abstractmethod
    def check_takes(self) -> None:
        """Raise ParameterError, before a file is sent, if files cannot be imported."""

    @abstractmethod
    def take(self, content: IO[bytes], size: int) -> None:
        """Import a segment's file of ``size`` bytes. Raises RefusedFileError."""

    def chosen(self, keys: Sequence[str] | None, *, every: bool = False) -> Sequence[Row]:
        """Return the one segment for each key prefix, or all. Raises ParameterError."""
        if bool(keys) == every:
            raise ParameterError("name segments by their keys, or give --all")
        rows = self.rows()
        if every:
            return rows
        chosen: list[Row] = []
        for begun in keys or ():
            found = [row for row in rows if row["key"].startswith(begun.lower())]
            if len(found) != 1:
                raise ParameterError(f"{len(found)} segments have a key that begins with '{begun}'; see inlay cache ls")
            chosen += found
        return chosen


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


_SEGMENTS = "/v1/cache/segments"
_PAGE = 1000
_NO_KEY = 401
_WAIT_S = 600.0
_MOST_TEXT = 2**24
_MOST = 2**20  # the most characters of an error


class RunningCache(CacheSource):
    """The cache of a running server.

    Args:
        url: the server's address, like "http://127.0.0.1:8000".
        api_key: None for none.
        wait_s: seconds to wait for an answer. Encodings are slow.

    Raises:
        ParameterError: for a wrong address, an unreachable server, or a refused request.
    """

    def __init__(self, url: str, api_key: str | None = None, *, wait_s: float = _WAIT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ParameterError(f"--url is {url!r:.200}; write the address of a server, like http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._wait_s = wait_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def rows(self) -> list[dict[str, Any]]:
        """Return all segments that the key may see, by key."""
        rows: list[dict[str, Any]] = []
        while True:
            query = {"limit": _PAGE} | ({"after": rows[-1]["key"]} if rows else {})
            page = self._ask("GET", f"{_SEGMENTS}?{urlencode(query)}")
            rows += page["data"]
            if not page["has_more"] or not page["data"]:
                return rows

    def table(self, rows: Iterable[Row]) -> Iterator[str]:
        yield f"{'key':{SHOWN}}  {'tokens':>7}  {'MiB':>8}  {'codec':5}  {'uses':>5}  {'where':16}  module"
        for row in rows:
            module = "part of a message" if row["schema"] is None else f"{row['schema']}/{row['module']}".rstrip("/")
            pin = "  (pinned)" if row["pinned"] else ""
            uses = "" if row["uses"] is None else f"{row['uses']:,}"
            yield (
                f"{row['key'][:SHOWN]}  {row['tokens']:7,}  {row['bytes'] / 2**20:8.1f}  {row['codec']:5}  "
                f"{uses:>5}  {', '.join(row['tiers']):16}  {module}{pin}"
            )

    def describe(self, row: Row) -> Row:
        return self._ask("GET", f"{_SEGMENTS}/{row['key']}")

    def pin(self, row: Row, pinned: bool) -> None:
        self._ask("PUT" if pinned else "DELETE", f"{_SEGMENTS}/{row['key']}/pin")

    def evict(self, row: Row) -> None:
        self._ask("DELETE", f"{_SEGMENTS}/{row['key']}")

    def evict_all(self) -> tuple[int, int, int]:
        gone = self._ask("DELETE", _SEGMENTS)
        return gone["evicted_segments"], gone["evicted_bytes"], gone["public_segments_left"]

    def verify(self, tell: Callable[[str], object]) -> tuple[int, int]:
        found = self._ask("POST", "/v1/cache/verify", {})
        for problem in found["problems"]:
            tell(problem)
        return found["whole"], found["damaged"]

    def stats(self) -> Row:
        """Return totals by tier."""
        return self._ask("GET", "/v1/cache")

    def summary(self, stats: Row) -> Iterator[str]:
        yield stats["model"]
        for name in ("pool", "host", "disk", "shared"):
            tier = stats[name]
            if tier is not None:
                size = f"{tier['tokens']:,} tokens, {tier['bytes'] / 2**20:,.1f} MiB"
                pinned = f", {tier['pinned_bytes'] / 2**20:,.1f} MiB pinned" if name == "pool" else ""
                others = tier.get("all_models", tier)["segments"] - tier["segments"]
                beside = f", beside {others:,} segments of other models" if others else ""
                yield f"{name}: {tier['segments']:,} segments, {size}{pinned}{beside}"

    def export(self, rows: Iterable[Row], draft: Path) -> int:
        written = 0
        with tarfile.open(draft, "w") as archive:
            for row in rows:
                if "disk" not in row["tiers"]:
                    continue
                with self._open("GET", f"{_SEGMENTS}/{row['key']}/file", None, "") as response:
                    member = tarfile.TarInfo(f"{row['key']}.safetensors")
                    member.size = int(response.headers["Content-Length"])
                    archive.addfile(member, response)
                written += 1
        return written

    def check_takes(self) -> None:
        found = self.stats()
        if not found["admin"]:
            raise ParameterError(f"{self.url}: only an admin may put files into the store; give an admin's --api-key")
        if found["disk"] is None:
            raise ParameterError(f"{self.url}: this server keeps no store on disk; start it with --store PATH")

    def take(self, content: IO[bytes], size: int) -> None:
        with tempfile.TemporaryFile() as copy:
            while block := content.read(1 << 20):
                copy.write(block)
            copy.seek(0)
            try:
                with self._open("POST", "/v1/cache/files", copy, "application/octet-stream", size):
                    pass
            except _StatusError as error:
                if error.status != 400:
                    raise
                raise RefusedFileError(str(error)) from None

    def warm(self, name: str, document: dict[str, Any] | None, options: dict[str, Any]) -> tuple[int, int]:
        """Encode a schema, and add it first if the server has none of that name.

        Args:
            document: the schema, in case it must be added.

        Returns:
            The encoded and the total tokens.
        """
        if document is not None:
            names = {one["name"] for one in self._schemas()}
            if name not in names:
                self._ask("POST", "/v1/schemas", {"schema": document, "encode": False, **options})
        found = self._ask("POST", f"/v1/schemas/{quote(name, safe='')}/warm", {})
        return int(found["encoded"]), int(found["of"])

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON answer to a GET request. Errors as of the class."""
        return self._ask("GET", path)

    def text(self, path: str) -> str:
        """Return the text of a GET request, cut after 16 MiB. Errors as of the class."""
        with self._open("GET", path, None, "") as response:
            content: bytes = response.read(_MOST_TEXT)
            return content.decode(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer to a request. Errors as of the class."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request and return the JSON answer. ``body`` is a JSON value, or None."""
        data = None if body is None else json.dumps(body).encode()
        with self._open(method, path, data, "application/json") as response:
            content = response.read()
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ParameterError(f"{self.url}{path} gives no JSON object; see that --url is an inlay server")
        return answer

    def _schemas(self) -> Iterator[dict[str, Any]]:
        after = ""
        while True:
            page = self._ask("GET", f"/v1/schemas?{urlencode({'limit': 100, 'after': after})}")
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["last_id"]

    @contextmanager
    def _open(self, method: str, path: str, data: Any, kind: str, size: int | None = None) -> Iterator[Any]:
        headers = dict(self._headers) | ({"Content-Type": kind} if kind else {})
        if size is not None:
            headers["Content-Length"] = str(size)
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._wait_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            if error.code == _NO_KEY and not self._headers:
                message = f"{self.url}: this server has keys; give one with --api-key or INLAY_API_KEY"
                raise _StatusError(message, error.code) from None
            raise _StatusError(f"{self.url}: {_sentence(error)}", error.code) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ParameterError(f"{self.url} does not answer ({reason}); see that inlay serve runs there") from None


class _StatusError(ParameterError):
    """A server has refused a request. ``status`` is that of its answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _sentence(error: urllib.error.HTTPError) -> str:
    """Return the message in a server's refusal."""
    try:
        return str(json.loads(error.read(_MOST))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"it answers with status {error.code}; see that it is inlay serve of this version"
