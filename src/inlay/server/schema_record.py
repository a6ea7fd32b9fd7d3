"""The server's record of a schema, its JSON in the API, and its prewarm task.

The API shows a schema as a summary, or in detail with its modules and their encoded tokens. A prewarm task encodes the
modules ahead of time. Several callers may wait for the same task and watch it.

A request body holds a schema as PML or JSON, with options.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NoReturn, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inlay.api.dialect import Dialect
from inlay.api.failures import INTERNAL_ERROR, MAX_PROBLEMS, BodyError, Failure, failure_of, not_an_object
from inlay.api.reading import MAX_FIELDS, walk
from inlay.client.async_llm import AsyncLLM
from inlay.errors import AbortedError, InlayError, PolicyError
from inlay.pml import Module, Schema, Turn, Union
from inlay.pml.attributes import objection
from inlay.pml.json_form import document_from_json
from inlay.pml.json_readers import read_schema_json
from inlay.pml.readers import read_schema
from inlay.pml.rules import ByPath
from inlay.pml.sources import Folder, UnreadableError, document_from_string
from inlay.policy import FIELDS, PolicyFields, ReusePolicy, check_schema_fields
from inlay.prompt.layout import SchemaLayout
from inlay.server.metrics import text_tokens
from inlay.wording import shown

MAX_TAGS = 50_000  # of a schema as PML; parsing that many takes a second or two
MAX_VALUES = 200_000  # values and field names of a schema as JSON; a module has about 8
SOURCE = "schema"  # the name of a document without a file, in problems


class SchemaOptions(BaseModel):
    """The options beside a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    public: bool | None = Field(None, description="true or false")
    encode: bool | Literal["background"] = Field(True, description='true, false or "background"')
    reuse: str | None = Field(None, description='"isolated", "anchored", "primed", "modular" or "auto"')
    tolerance: float | str | None = Field(None, description=PolicyFields.help("tolerance"))
    positions: str | None = Field(None, description='"schema" or "packed"')
    ttl: str | None = Field(None, description='a lifetime such as "5m", "1h" or "inf"', max_length=32)


class SchemaBody(SchemaOptions):
    """The JSON body of a request that creates a schema or a new version."""

    pml: str | None = Field(None, description="a schema as PML: <schema name=…>…</schema>")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description='a schema as JSON: {"name": "…", "content": […]}'
    )


_OPTIONS = frozenset(SchemaOptions.model_fields)


#: OpenAPI descriptions of routes with and without a schema in the body, and the meaning of each status.
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": SchemaBody.model_json_schema() | {"oneOf": [{"required": ["pml"]}, {"required": ["schema"]}]}
            },
            "application/xml": {"schema": {"type": "string", "description": "PML; options stand in the query"}},
        },
    },
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in SchemaOptions.model_fields
    ],
}
NO_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"enum": [{}]}}}}}
_WRONG = {
    400: "A field or the schema is wrong; error.problems lists what is wrong with the schema.",
    401: "The key is wrong.",
    403: "More than the key or the server allows.",
    404: "There is no such schema.",
    408: "The body came too slowly.",
    409: "There is one of that name; or it was deleted or replaced while it was encoded.",
    412: "If-Match names another version.",
    413: "The body is too large.",
    415: "The body is neither JSON nor XML, or there is none and no Content-Type.",
    429: "Too many requests.",
    503: "The server is stopping.",
    507: "The device has no memory left.",
}
RESPONSES: dict[int | str, dict[str, Any]] = {status: {"description": says} for status, says in _WRONG.items()}


@dataclass(frozen=True, slots=True)
class SchemaSource:
    """The source of a schema.

    Args:
        form: "pml" or "schema" (JSON).
        text: the text in that form.
        schema: the parsed schema.
        size: bytes of the text in UTF-8.
        sha256: of the text.
    """

    form: Literal["pml", "schema"]
    text: str
    schema: Schema
    size: int
    sha256: str

    def document(self) -> str | dict[str, Any]:
        """Return the source as a request body gives it."""
        document: str | dict[str, Any] = self.text if self.form == "pml" else json.loads(self.text)
        return document


def of_schema(schema: Schema) -> SchemaSource:
    """Return the source of a schema from an operator's file. The text of files that it names is included."""
    return _source("schema", schema.to_json(), schema)


def of_text(form: Literal["pml", "schema"], text: str) -> SchemaSource:
    """Parse a text of this form and return its source, with the text unchanged. Raises PMLError."""
    read = _of_pml(text) if form == "pml" else _of_json(json.loads(text))
    return _source(form, text, read.schema)


class GivenSchema:
    """The schema of a request, taken out of the request's state. It is dropped once it is parsed.

    ``options`` are the options beside it. ``field`` is the body's field that holds it.
    """

    def __init__(self, state: dict[str, Any], query: Mapping[str, str]) -> None:
        body = read_body(state["body"], query)
        state["body"] = None
        self.field = "pml" if body.pml is not None else "schema"
        self.options = SchemaOptions.model_validate(body.model_dump(include=body.model_fields_set & _OPTIONS))
        self._body: SchemaBody | None = body

    def tokens(self) -> int:
        """Estimate its tokens before it is parsed."""
        assert self._body is not None, "it was not read yet"
        pml = self._body.pml
        return text_tokens(pml) if pml is not None else sum(map(text_tokens, _texts(self._body.schema_)))

    def taken(self) -> SchemaBody:
        """Return the body that holds it. Call it once."""
        body, self._body = self._body, None
        assert body is not None, "a schema is read once"
        return body


def read_body(body: Any, query: Mapping[str, str]) -> SchemaBody:
    """Return the fields of a request body: a JSON object, or PML as text with its options in the query.

    Raises BodyError, which names every problem.
    """
    if isinstance(body, str):
        words: dict[str, Any] = {"true": True, "false": False}
        if "pml" in query or "schema" in query:
            raise BodyError("the query and the body both hold a schema; leave it out of the query", param="query")
        return _validated({"pml": body, **{name: words.get(value, value) for name, value in query.items()}})
    if not isinstance(body, Mapping):
        raise not_an_object(body, '{"pml": "…"} or {"schema": {…}}')
    if query:
        raise BodyError(
            f"the query holds {shown(next(iter(query)))}; with a body of JSON, options stand in the body", param="query"
        )
    return _validated({name: value for name, value in body.items() if value is not None})


def read_source(body: SchemaBody) -> SchemaSource:
    """Parse the schema of a body. It never reads files. It is slow. Raises BodyError and PMLError."""
    if (body.pml is None) == (body.schema_ is None):
        raise BodyError('there is no schema, or there are two; give one of "pml" and "schema"', param="pml")
    _check_size(body)
    source = _of_pml(body.pml) if body.pml is not None else _of_json(body.schema_ or {})
    wrong = objection(source.schema.name)
    if wrong is not None:
        raise BodyError(f"a server's schemas are named like modules, and {wrong}", param="name", code="invalid_name")
    return source


def check_name(source: SchemaSource, name: str) -> None:
    """Raise BodyError if the schema's name differs from the path's."""
    given = source.schema.name
    if given != name:
        message = f"the schema is named {given!r:.100} and the path says {name!r:.100}; write the same name in both"
        raise BodyError(message, param="name", code="invalid_name")


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(member)


def _of_pml(text: str) -> SchemaSource:
    parts = read_schema(document_from_string(text, SOURCE), SOURCE, _NoFiles(), declaration_counts=False)
    return _source("pml", text, Schema(parts.name, parts.children, parts.scaffolds, SOURCE, parts.meta))


def _of_json(given: Mapping[str, Any]) -> SchemaSource:
    document = document_from_json(given, SOURCE)
    parts = read_schema_json(document, SOURCE, _NoFiles())
    return _source("schema", document.decode(), Schema(parts.name, parts.children, parts.scaffolds, SOURCE, parts.meta))


def _source(form: Literal["pml", "schema"], text: str, schema: Schema) -> SchemaSource:
    data = text.encode()
    return SchemaSource(form, text, schema, len(data), hashlib.sha256(data).hexdigest())


def _check_size(body: SchemaBody) -> None:
    """Raise BodyError for a schema that would take long to parse.

    Other requests wait for the same Python threads.
    """
    if body.pml is not None and body.pml.count("<") > MAX_TAGS:
        message = f"pml holds more than {MAX_TAGS:,} tags; make several schemas of it"
        raise BodyError(message, param="pml")
    counts = accumulate(len(piece) for _, piece in walk(body.schema_))
    if any(count > MAX_VALUES for count in counts):
        message = f"schema holds more than {MAX_VALUES:,} values and names; make several schemas of it"
        raise BodyError(message, param="schema")


class _NoFiles(Folder):
    """The folder of a schema from the network. It reads no file from the server's disk."""

    def __init__(self) -> None:
        super().__init__("")

    def read(self, src: str) -> NoReturn:
        raise UnreadableError(
            "src names a file, but the server reads no files for requests; put the text into the module"
        )


def _validated(given: dict[str, Any]) -> SchemaBody:
    if len(given) > MAX_FIELDS:
        raise BodyError(
            f"the body has {len(given):,} fields; it may have at most {MAX_FIELDS}, so leave out the others"
        )
    try:
        check_schema_fields((name for name in given if name in FIELDS and name not in _OPTIONS), "a schema")
    except PolicyError as error:
        raise BodyError(str(error), param=error.field, code=error.code) from None
    try:
        return SchemaBody.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    problems = {str(one["loc"][0]): one["type"] for one in found[:MAX_PROBLEMS]}
    raise BodyError(
        ". Also: ".join(_sentence(name, kind, given) for name, kind in problems.items()),
        param=next(iter(problems)),
        code="unknown_field" if "extra_forbidden" in problems.values() else "invalid_value",
    )


def _sentence(name: str, kind: str, given: Mapping[str, Any]) -> str:
    fields = {field.alias or key: field.description for key, field in SchemaBody.model_fields.items()}
    if kind == "extra_forbidden":
        return f"a schema takes no field {shown(name)}; it takes {', '.join(fields)}"
    return f"{name} is {shown(given[name])}; it must be {fields[name]}"


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
