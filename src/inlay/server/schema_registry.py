"""The schemas that a server knows: whose they are, their versions, and how far they are encoded.

A schema is public, or its tenant's alone. Names are taken once among the public ones and once for every tenant, whose
own schema stands before a public one of that name. To everybody else a private schema does not exist.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inlay.api.failures import BodyError
from inlay.async_llm import AsyncLLM
from inlay.errors import ParameterError
from inlay.pml import Schema
from inlay.policy import BEST
from inlay.prompt.layout import SchemaLayout
from inlay.server.prewarm import Warming
from inlay.server.schema_documents import SchemaBody, Source, of_schema, read_source
from inlay.server.tenants import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfLimits:
    """What one tenant may have, and what the public schemas together may.

    schemas: how many. source_bytes: of their sources, in UTF-8, all together. versions: how many past ones are listed.
    """

    schemas: int = 200
    source_bytes: int = 16 * 2**20
    versions: int = 100


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a schema: its number from 1, when it was made (seconds since 1970), and its source's sha256."""

    version: int
    created: float
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """The current version of a schema, and what its past ones were.

    salt: of the tenant who owns it; None for a public one. reuse, positions: what its modules are encoded for; None
    for nothing that can be encoded ahead, and for the engine's default. tokens: of all its text. versions: oldest
    first, the current one last.
    """

    name: str
    salt: str | None
    source: Source
    layout: SchemaLayout
    reuse: str | None
    positions: str | None
    tokens: int
    versions: tuple[Version, ...]

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


class SchemaShelf:
    """All schemas of one server. One event loop's.

    clock: seconds since 1970.
    """

    def __init__(
        self, llm: AsyncLLM, limits: ShelfLimits | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._llm = llm
        self._limits = limits or ShelfLimits()
        self._clock = clock
        self._entries: dict[tuple[str | None, str], Entry] = {}
        self._warmings: dict[tuple[str | None, str], Warming] = {}
        self._locks: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)  # by salt: one change at a time
        self._looks: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)  # by salt: one look at a time

    def __len__(self) -> int:
        return len(self._entries)

    async def publish(self, schema: Schema, *, reuse: str | None = str(BEST)) -> Entry:
        """Put a public schema on the shelf, as the operator's. Raises PMLError, and BodyError where its name is taken.

        reuse: what its modules are encoded for, by ``warm``; None where nobody may ask for modules.
        """
        return await self.create(of_schema(schema), salt=None, reuse=reuse, positions=None)

    def find(self, name: str, tenant: Tenant, *, public: bool | None = None) -> Entry:
        """What a tenant means by a name: its own schema, else a public one. Raises BodyError.

        public: True for the public one alone, False for its own alone.
        """
        salts = {None: (tenant.salt, None), True: (None,), False: (tenant.salt,)}[public]
        entry = next((self._entries[salt, name] for salt in salts if (salt, name) in self._entries), None)
        if entry is None:
            raise _unknown(name)
        return entry

    def own(self, name: str, tenant: Tenant, *, public: bool | None = None) -> Entry:
        """The schema of that name that a tenant may change. Raises BodyError."""
        entry = self.find(name, tenant, public=public)
        if entry.public and not tenant.admin:
            raise BodyError(
                f"schema {name!r:.100} is public, and only an admin may change it; make one of your own by POST",
                code="admin_only",
                status=403,
            )
        return entry

    def visible(self, tenant: Tenant) -> list[Entry]:
        """All schemas that a tenant can name, by name; the public ones that its own stand before are left out."""
        salts = (None, tenant.salt)
        return sorted({e.name: e for salt in salts for e in self._of(salt)}.values(), key=lambda entry: entry.name)

    async def read(self, body: SchemaBody, tenant: Tenant) -> Source:
        """The schema that a body of a tenant's holds. Raises BodyError and PMLError."""
        return await self._llm.pools.schemas.run(read_source, body, owner=tenant.salt)

    async def create(self, source: Source, *, salt: str | None, reuse: str | None, positions: str | None) -> Entry:
        """Put a new schema on the shelf. Raises BodyError, and PMLError where it cannot be laid out."""
        name = source.schema.name
        async with self._locks[salt]:
            if (salt, name) in self._entries:
                raise BodyError(
                    f"there is a schema {name!r:.100} already; change it with PUT, or DELETE it first",
                    code="already_exists",
                    status=409,
                )
            self._check_room(salt, source, None)
            return await self._keep(source, salt, reuse, positions, ())

    async def replace(
        self, before: Entry, source: Source, *, reuse: str | None, positions: str | None, if_match: str | None
    ) -> Entry:
        """Make a new version of a schema; requests under way finish on the old one. Raises BodyError and PMLError."""
        async with self._locks[before.salt]:
            current = await self._current(before, if_match)
            self._check_room(current.salt, source, current)
            return await self._keep(source, current.salt, reuse, positions, current.versions)

    async def remove(self, before: Entry, *, if_match: str | None) -> None:
        """Take a schema from the shelf; requests under way finish, its encoding ends. Raises BodyError."""
        async with self._locks[before.salt]:
            entry = await self._current(before, if_match)
            self._llm.remove_schema(entry.name, cache_salt=entry.salt)
            self._warmings.pop((entry.salt, entry.name), None)
            del self._entries[entry.salt, entry.name]

    async def warm(self, entry: Entry, tenant: str = "") -> Warming:
        """Encode a schema's modules, those that are not; joins whoever does so already. Raises BodyError.

        It goes on to its end whoever waits for it, unless the schema is replaced or deleted meanwhile.
        tenant: the name of who asks for it.
        """
        async with self._locks[entry.salt]:  # no change is half done
            key = (entry.salt, entry.name)
            if key not in self._entries:
                raise _unknown(entry.name)
            if key not in self._warmings or self._warmings[key].over:
                self._warmings[key] = Warming(self._llm, self._entries[key], tenant)
            return self._warmings[key]

    def warming(self, entry: Entry) -> Warming | None:
        """The encoding of this version that was begun last."""
        return self._warmings.get((entry.salt, entry.name))

    async def stored(self, entry: Entry) -> dict[str, tuple[int, int]]:
        """Module → tokens that can be encoded ahead, and how many of them are stored now; see AsyncLLM.stored."""
        if entry.reuse is None:
            return {}
        try:
            async with self._looks[entry.salt]:  # each goes through all modules, on a thread that others want, too
                return await self._llm.stored(
                    entry.name, reuse=entry.reuse, positions=entry.positions, cache_salt=entry.salt
                )
        except ParameterError:  # it was deleted meanwhile
            return {}

    @property
    def bytes_per_token(self) -> int:
        """What a stored token takes."""
        return self._llm.store.pool.bytes_per_token

    async def _keep(
        self, source: Source, salt: str | None, reuse: str | None, positions: str | None, past: Sequence[Version]
    ) -> Entry:
        schema = source.schema
        layout = await self._llm.add_schema(schema, encode=False, cache_salt=salt)
        number = past[-1].version + 1 if past else 1
        versions = (*past, Version(number, self._clock(), source.sha256))[-self._limits.versions :]
        tokens = sum(len(run.ids) for run in layout.runs)
        entry = Entry(schema.name, salt, source, layout, reuse, positions, tokens, versions)
        self._warmings.pop((salt, schema.name), None)
        self._entries[salt, schema.name] = entry
        return entry

    async def _current(self, before: Entry, if_match: str | None) -> Entry:
        """The entry that to change where this one stood. Raises BodyError where that is not what was meant."""
        key = (before.salt, before.name)
        if key in self._warmings:
            await self._warmings[key].begun()  # until then it might put back what is taken away
        entry = self._entries.get(key)
        if entry is None:
            raise _unknown(before.name)
        if if_match is not None and not _matches(entry, if_match):
            raise BodyError(
                f"If-Match does not name the current version of schema {entry.name!r:.100}, which is {entry.version}, "
                f"etag {entry.etag}; GET it and try again",
                param="If-Match",
                code="version_mismatch",
                status=412,
            )
        return entry

    def _check_room(self, salt: str | None, source: Source, before: Entry | None) -> None:
        """Raises BodyError where a tenant has as much as it may. before: what the source replaces."""
        others = [entry for entry in self._of(salt) if entry is not before]
        whose = "the server has" if salt is None else "you have"
        if len(others) >= self._limits.schemas:
            raise _too_much(f"{whose} {len(others)} schemas, as many as may be; delete one first")
        size, most = sum(entry.source.size for entry in others) + source.size, self._limits.source_bytes
        if size > most:
            raise _too_much(f"with this one {whose} schemas of {size:,} bytes, and {most:,} may be; delete one first")

    def _of(self, salt: str | None) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.salt == salt]


def _matches(entry: Entry, if_match: str) -> bool:
    """Whether an If-Match header names this version: by its etag, by its number, or "*" for any."""
    named = [one.strip() for one in if_match.split(",")]
    return "*" in named or entry.etag in named or str(entry.version) in [one.strip('"') for one in named]


def _unknown(name: str) -> BodyError:
    """The same for a schema of somebody else's as for one that nobody has."""
    return BodyError(f"there is no schema {name!r:.100}; GET /v1/schemas lists them", code="not_found", status=404)


def _too_much(message: str) -> BodyError:
    return BodyError(message, code="schema_limit", status=403)
