"""One schema as the server keeps it, as the API shows it, and its prewarm: the encoding of its modules ahead of time.

The API shows it in a line, or with its modules and what is encoded. A prewarm is one task, which several may wait for
and watch.
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
from inlay.pml.scopes import ByPath
from inlay.policy import ReusePolicy
from inlay.prompt.layout import SchemaLayout
from inlay.server.schema_documents import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """One version of a schema: its number from 1, when it was made (seconds since 1970), and its source's sha256.

    form, text: of the source of a past version, as far as it is kept; see KeptSchema.
    """

    version: int
    created: float
    sha256: str
    form: Literal["pml", "schema"] | None = field(default=None, compare=False)
    text: str | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Bytes of the text that is kept, in UTF-8."""
        return 0 if self.text is None else len(self.text.encode())


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """The current version of a schema, and what its past ones were.

    salt: of the tenant who owns it; None for a public one. reuse, positions: what its modules are encoded for; None
    for nothing that can be encoded ahead, and for the engine's default. tokens: of all its text. versions: oldest
    first, the current one last. ttl: the lifetime of what is encoded of it, as it was written; None for none.
    """

    name: str
    salt: str | None
    source: Source
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
        """What tells this version from all others of this name, also of a schema that was deleted since."""
        now = self.versions[-1]
        return f'"{now.version}-{now.sha256[:16]}-{int(now.created * 1e6):x}"'

    @property
    def public(self) -> bool:
        return self.salt is None


@dataclass(frozen=True, slots=True)
class KeptSchema:
    """A schema as it outlives the server that it was made on. form, text: its source's; the rest as of SchemaRecord."""

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
    """Where schemas outlive a server, and several servers of one model share them. Its methods may take long."""

    def changed(self) -> bool:
        """Whether somebody else may have changed something since ``all``. Quick."""
        ...

    def all(self) -> list[KeptSchema]:
        """What is kept now."""
        ...

    def keep(self, kept: KeptSchema) -> bool:
        """Keep a schema; returns False where another server has changed it meanwhile, and nothing is kept."""
        ...

    def drop(self, kept: KeptSchema) -> bool:
        """Keep it no longer; returns False as above."""
        ...


def past_source(version: SchemaVersion) -> dict[str, Any] | None:
    """The source of a past version, as the body of a request gives it; None where it is not kept."""
    if version.form is None or version.text is None:
        return None
    return {version.form: version.text if version.form == "pml" else json.loads(version.text)}


#: The most modules that are shown at once.
MODULES = 1000

Stored = Mapping[str, tuple[int, int]]  # module → tokens that can be encoded ahead, and how many of them are stored


def summary(record: SchemaRecord) -> dict[str, Any]:
    """A schema in a line of a list."""
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
    """Some of a schema's modules, in the order of the document.

    after: the module behind which they begin; "" for the first one. limit: how many at most.
    """

    after: str = ""
    limit: int = MODULES

    def check(self, record: SchemaRecord) -> None:
        """Raises BodyError where the schema has no such module."""
        if self.after and self.after not in record.layout.schema.modules:
            raise BodyError(
                f"after is {self.after!r:.100}, and the schema has no such module; leave it out to begin with the "
                "first one, or take the last_id of a page",
                param="after",
            )

    def of(self, modules: ByPath[Module]) -> tuple[Sequence[str], bool]:
        """The paths of the modules on this page, and whether there are others behind it."""
        paths = list(modules)
        (last,) = modules.paths(self.after) if self.after else (None,)  # ``check`` has seen to it that there is one
        start = 0 if last is None else paths.index(last) + 1
        end = start + self.limit
        return paths[start:end], end < len(paths)


def detail(
    record: SchemaRecord, stored: Stored, encoding: dict[str, Any], bytes_per_token: int, page: Page
) -> dict[str, Any]:
    """A schema with its versions, the tree of the modules on a page, and what is encoded of each now.

    encoding: how far its encoding ahead of time is; see ``encoding``.
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
    """The modules of a schema as they nest: those that are shown, and those around them."""

    def __init__(self, layout: SchemaLayout, stored: Stored, bytes_per_token: int, shown: frozenset[str]) -> None:
        self._layout = layout
        self._shown = shown
        self._stored = stored
        self._bytes = bytes_per_token
        self.always = sum(len(run.ids) for run in layout.runs if not run.owner)

    def nodes(self, children: Iterable[object]) -> list[dict[str, Any]]:
        """Modules and unions among the children of a schema, a turn or a module."""
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
        """What of some modules can be encoded ahead, in tokens, and what of that is stored now."""
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
    """Encodes a schema from now on, to its end, whoever watches; or until the schema is deleted or replaced.

    One event loop's. record: what is encoded. tenant: who pays with its share of the passes. done, total: tokens; both
    0 until the schema is laid out. failure: what ended it before its time.
    """

    def __init__(self, llm: AsyncLLM, record: SchemaRecord, tenant: str) -> None:
        self.record = record
        self._tenant = tenant
        self.done = 0
        self.total = 0
        self.failure: Failure | None = None
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # replaced whenever it is set, so that nobody misses one
        self._task = self._loop.create_task(self._run(llm))

    @property
    def over(self) -> bool:
        return self._task.done()

    async def begun(self) -> None:
        """Wait until the schema is laid out and known to the model, or all is over."""
        if not self.over and not self.total:
            await self._changed.wait()

    async def result(self) -> PrewarmTask:
        """Wait for the end, which nobody who stops waiting puts off. Raises nothing: see ``failure``."""
        await asyncio.wait((self._task,))
        return self

    async def watch(self) -> AsyncIterator[tuple[int, int]]:
        """(done, total) whenever more is done, until the end; one who is slow misses some."""
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
                await asyncio.sleep(0)  # the last of what _report was told comes before the end
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
        """Called by the model, on whatever thread."""
        self._loop.call_soon_threadsafe(self._note, done, total)

    def _note(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def encoding(task: PrewarmTask | None, dialect: Dialect) -> dict[str, Any]:
    """How far the encoding ahead of a version is, in tokens, as the API shows it.

    state: "none" where it was never begun, "running", "done" or "failed", with the error as this dialect writes it.
    """
    if task is None:
        return {"state": "none", "done": 0, "total": 0}
    state = "running" if not task.over else "done" if task.failure is None else "failed"
    failed = {} if task.failure is None else dialect.error_body(task.failure)
    return {"state": state, "done": task.done, "total": task.total, **failed}
