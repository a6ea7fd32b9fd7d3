"""The server's record of a schema, its JSON in the API, and its prewarm task.

The API shows a schema as a summary, or in detail with its modules and their encoded tokens. A prewarm task encodes the
modules ahead of time. Several callers may wait for the same task and watch it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from inlay.api.dialect import Dialect
from inlay.api.failures import INTERNAL_ERROR, BodyError, Failure, failure_of
from inlay.client.async_llm import AsyncLLM
from inlay.errors import AbortedError, InlayError
from inlay.pml import Module, Turn, Union
from inlay.pml.rules import ByPath
from inlay.policy import ReusePolicy
from inlay.prompt.layout import SchemaLayout
from inlay.server.schema_documents import SchemaSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """One version of a schema.

    Args:
        version: its number, from 1.
        created: seconds since 1970.
        sha256: of its source.
        form: the form of a past version's source; None if the source is not kept.
        text: the source of a past version; None if it is not kept.
    """

    version: int
    created: float
    sha256: str
    form: Literal["pml", "schema"] | None = field(default=None, compare=False)
    text: str | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """The size of the kept text in UTF-8 bytes."""
        return 0 if self.text is None else len(self.text.encode())


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """The current version of a schema, and its history.

    Args:
        name: the schema's name.
        salt: the cache_salt of the tenant that owns it; None for a public schema.
        source: its source.
        layout: its layout.
        reuse: the policy that its modules are encoded for; None if nothing can be encoded ahead.
        positions: the positions that its modules are encoded for; None for the engine's default.
        tokens: the number of tokens of all its text.
        versions: oldest first, the current version last.
        ttl: the lifetime of its encoded states, as the request gave it; None for no limit.
    """

    name: str
    salt: str | None
    source: SchemaSource
    layout: SchemaLayout
    reuse: str | None
    positions: str | None
    tokens: int
    versions: tuple[SchemaVersion, ...]
    ttl: str | None = None

    @property
    def version(self) -> int:
        return self.versions[-1].version

    @property
    def etag(self) -> str:
        """An ETag that differs for every version of this name, even after the schema was deleted and created again."""
        now = self.versions[-1]
        return f'"{now.version}-{now.sha256[:16]}-{int(now.created * 1e6):x}"'

    @property
    def public(self) -> bool:
        return self.salt is None


@dataclass(frozen=True, slots=True)
class KeptSchema:
    """A schema in the form that a keeper stores.

    ``form`` and ``text`` are its source. The other fields are as in SchemaRecord.
    """

    name: str
    salt: str | None
    form: Literal["pml", "schema"]
    text: str
    reuse: str | None
    positions: str | None
    versions: tuple[SchemaVersion, ...]
    ttl: str | None = None

    @classmethod
    def of(cls, record: SchemaRecord) -> KeptSchema:
        source = record.source
        said = record.reuse, record.positions, record.versions, record.ttl
        return cls(record.name, record.salt, source.form, source.text, *said)


class SchemaKeeper(Protocol):
    """Stores schemas across restarts. Several servers of one model may share it. Its methods may block."""

    def changed(self) -> bool:
        """Return True if another server may have changed a schema since ``all``. It is fast."""
        ...

    def all(self) -> list[KeptSchema]:
        """Return the stored schemas."""
        ...

    def keep(self, kept: KeptSchema) -> bool:
        """Store a schema. Returns False and stores nothing if another server has changed it meanwhile."""
        ...

    def drop(self, kept: KeptSchema) -> bool:
        """Delete a schema. Returns False and deletes nothing if another server has changed it meanwhile."""
        ...


def past_source(version: SchemaVersion) -> dict[str, Any] | None:
    """Return the source of a past version as a request body gives it; None if it is not kept."""
    if version.form is None or version.text is None:
        return None
    return {version.form: version.text if version.form == "pml" else json.loads(version.text)}


#: The most modules in one response.
MODULES = 1000

Stored = Mapping[str, tuple[int, int]]  # module → (tokens that can be encoded ahead, tokens of them that are stored)


def summary(record: SchemaRecord) -> dict[str, Any]:
    """Return a schema as an entry of a list."""
    return {
        "object": "schema",
        "name": record.name,
        "public": record.public,
        "version": record.version,
        "etag": record.etag,
        "created": int(record.versions[-1].created),
        "reuse": record.reuse,
        "positions": record.positions,
        "ttl": record.ttl,
        "modules": len(record.layout.schema.modules),
        "tokens": record.tokens,
        "length": record.layout.length,
    }


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a schema's modules, in document order.

    Args:
        after: the module before the first one of the page; "" to start at the first module.
        limit: the most modules of the page.
    """

    after: str = ""
    limit: int = MODULES

    def check(self, record: SchemaRecord) -> None:
        """Raise BodyError if the schema has no module ``after``."""
        if self.after and self.after not in record.layout.schema.modules:
            raise BodyError(
                f"after is {self.after!r:.100}, and the schema has no such module; leave it out to begin with the "
                "first one, or take the last_id of a page",
                param="after",
            )

    def of(self, modules: ByPath[Module]) -> tuple[Sequence[str], bool]:
        """Return the paths of the modules on this page, and True if more modules follow."""
        paths = list(modules)
        (last,) = modules.paths(self.after) if self.after else (None,)  # ``check`` has ensured that the module exists
        start = 0 if last is None else paths.index(last) + 1
        end = start + self.limit
        return paths[start:end], end < len(paths)


def detail(
    record: SchemaRecord, stored: Stored, encoding: dict[str, Any], bytes_per_token: int, page: Page
) -> dict[str, Any]:
    """Return a schema with its versions, the tree of the modules on a page, and the encoded tokens of each module.

    Args:
        record: the schema.
        stored: the stored tokens by module.
        encoding: the state of its prewarm task; see ``encoding``.
        bytes_per_token: bytes of KV per token.
        page: the modules to show.
    """
    schema = record.layout.schema
    shown, has_more = page.of(schema.modules)
    tree = _Tree(record.layout, stored, bytes_per_token, frozenset(shown))
    return {
        **summary(record),
        "modules": tree.nodes(schema.children),
        "last_id": shown[-1] if shown else None,
        "has_more": has_more,
        "always": {"tokens": tree.always, "encoded": tree.encoded("")},
        "encoded": tree.encoded(*stored),
        "encoding": encoding,
        "versions": [
            {"version": one.version, "created": int(one.created), "sha256": one.sha256} for one in record.versions
        ],
    }


class _Tree:
    """Builds the tree of a schema's modules: the shown modules and their parents."""

    def __init__(self, layout: SchemaLayout, stored: Stored, bytes_per_token: int, shown: frozenset[str]) -> None:
        self._layout = layout
        self._shown = shown
        self._stored = stored
        self._bytes = bytes_per_token
        self.always = sum(len(run.ids) for run in layout.runs if not run.owner)

    def nodes(self, children: Iterable[object]) -> list[dict[str, Any]]:
        """Return the modules and unions among the children of a schema, a turn or a module."""
        found: list[dict[str, Any]] = []
        for child in children:
            if isinstance(child, Turn):
                found += self.nodes(child.children)
            elif isinstance(child, Union):
                members = self.nodes(child.members)
                found += [{"union": members}] if members else []
            elif isinstance(child, Module):
                path, inside = self._layout.schema.paths[child.order], self.nodes(child.children)
                found += [self._module(child, path, inside)] if inside or path in self._shown else []
        return found

    def encoded(self, *modules: str) -> dict[str, int]:
        """Return the tokens of some modules that can be encoded ahead, and the part of them that is stored now."""
        counts = [self._stored.get(module, (0, 0)) for module in modules]
        tokens = sum(stored for _, stored in counts)
        return {"tokens": tokens, "of": sum(of for of, _ in counts), "bytes": tokens * self._bytes}

    def _module(self, module: Module, path: str, inside: list[dict[str, Any]]) -> dict[str, Any]:
        extent = self._layout.extents[path]
        params = self._layout.schema.levels[path].params.values()
        return {
            "module": path,
            "tokens": extent.tokens,
            "length": extent.end - extent.start,
            "encoded": self.encoded(path),
            "params": [{"param": p.name, "len": p.length, "default": p.default} for p in params],
            "modules": inside,
        }


class PrewarmTask:
    """Encodes a schema in the background, until the end or until the schema is deleted or replaced.

    It continues if no caller waits for it. Use it from one event loop.

    Args:
        llm: the model.
        record: the schema to encode.
        tenant: the tenant whose share of the passes pays for it.

    ``done`` and ``total`` count tokens, and are 0 until the schema is laid out. ``failure`` is the reason of an early
    end.
    """

    def __init__(self, llm: AsyncLLM, record: SchemaRecord, tenant: str) -> None:
        self.record = record
        self._tenant = tenant
        self.done = 0
        self.total = 0
        self.failure: Failure | None = None
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # replaced whenever it is set, so that no waiter misses a change
        self._task = self._loop.create_task(self._run(llm))

    @property
    def over(self) -> bool:
        return self._task.done()

    async def begun(self) -> None:
        """Wait until the schema is laid out and known to the model, or the task has ended."""
        if not self.over and not self.total:
            await self._changed.wait()

    async def result(self) -> PrewarmTask:
        """Wait for the end. Cancelling the wait does not cancel the task. It raises nothing; see ``failure``."""
        await asyncio.wait((self._task,))
        return self

    async def watch(self) -> AsyncIterator[tuple[int, int]]:
        """Yield (done, total) after each progress, until the end. A slow reader misses some updates."""
        seen = 0
        while True:
            changed, done = self._changed, self.done
            if done != seen:
                seen = done
                yield done, self.total
            elif self.over:
                return
            else:
                await changed.wait()

    async def _run(self, llm: AsyncLLM) -> None:
        record = self.record
        try:
            if record.reuse is not None:
                await llm.add_schema(
                    record.layout.schema,
                    replace=True,
                    reuse=ReusePolicy.parse(record.reuse),
                    positions=record.positions,
                    progress=self._report,
                    cache_salt=record.salt,
                    ttl=record.ttl,
                    tenant=self._tenant,
                )
                await asyncio.sleep(0)  # the last scheduled _report runs before the end
        except AbortedError as error:
            self.failure = failure_of(BodyError(str(error), code="encoding_ended", status=409))
        except InlayError as error:
            self.failure = failure_of(error)
            logger.warning("a schema could not be encoded: %s", self.failure.name)
        except Exception:
            self.failure = INTERNAL_ERROR
            logger.exception("a schema could not be encoded")
        finally:
            self._notify()

    def _report(self, done: int, total: int) -> None:
        """The model calls this on any thread."""
        self._loop.call_soon_threadsafe(self._note, done, total)

    def _note(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def encoding(task: PrewarmTask | None, dialect: Dialect) -> dict[str, Any]:
    """Return the state of a version's prewarm, with its tokens, as the API shows it.

    The state is "none" if no prewarm was started, else "running", "done" or "failed". A failure has its error in this
    dialect.
    """
    if task is None:
        return {"state": "none", "done": 0, "total": 0}
    state = "running" if not task.over else "done" if task.failure is None else "failed"
    failed = {} if task.failure is None else dialect.error_body(task.failure)
    return {"state": state, "done": task.done, "total": task.total, **failed}
