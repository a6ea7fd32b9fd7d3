"""The schemas of a server: their owners, their versions, and their encoding.

A schema is public, or private to its tenant. Names are unique among the public schemas and within each tenant. A
tenant's own schema hides a public one of the same name. For other tenants, a private schema does not exist.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from inlay.api.failures import BodyError
from inlay.client.async_llm import AsyncLLM
from inlay.errors import InlayError, ParameterError
from inlay.kv.identity import SegmentSpec
from inlay.kv.lifetimes import BY_KEY
from inlay.pml import Schema
from inlay.policy import BEST
from inlay.prompt.contexts import PUBLIC, SchemaRegistry
from inlay.server.limits import Tenant
from inlay.server.schema_record import (
    KeptSchema,
    PrewarmTask,
    SchemaBody,
    SchemaKeeper,
    SchemaRecord,
    SchemaSource,
    SchemaVersion,
    of_schema,
    of_text,
    read_source,
)
from inlay.types import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaQuotas:
    """The limits for the schemas of one tenant, and for all public schemas together.

    Args:
        schemas: the number of schemas.
        source_bytes: bytes of all their sources, in UTF-8.
        versions: the number of past versions that are listed.
        past_bytes: bytes of all sources of past versions.
    """

    schemas: int = 200
    source_bytes: int = 16 * 2**20
    versions: int = 100
    past_bytes: int = 8 * 2**20


class SchemaCatalog:
    """All schemas of one server, with their versions and quotas. Use it from one event loop.

    Args:
        llm: the model.
        quotas: the limits of each tenant.
        keeper: stores schemas across restarts; None to keep them in memory only.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        quotas: SchemaQuotas | None = None,
        *,
        keeper: SchemaKeeper | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._llm = llm
        self._keeper = keeper
        self._refreshing = asyncio.Lock()
        self._quotas = quotas or SchemaQuotas()
        self._clock = clock
        self._records: SchemaRegistry[SchemaRecord] = SchemaRegistry()
        self._prewarms: dict[tuple[str | None, str], PrewarmTask] = {}
        self._locks: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)  # by salt: one change at a time
        self._looks: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)  # by salt: one look-up at a time

    def __len__(self) -> int:
        return len(self._records)

    async def publish(self, schema: Schema, *, reuse: str | None = str(BEST), ttl: str | None = None) -> SchemaRecord:
        """Register a public schema of the operator.

        A stored schema of this name is kept if it is the same, else replaced.

        Args:
            schema: the schema.
            reuse: the policy that ``prewarm`` encodes its modules for; None if no request may use modules.
            ttl: see SchemaRecord.

        Raises:
            PMLError: the schema cannot be laid out.
            BodyError: its name is taken.
        """
        source = of_schema(schema)
        known = None if self._keeper is None else self._records.get(schema.name, PUBLIC)
        if known is None:
            return await self.create(source, salt=None, reuse=reuse, positions=None, ttl=ttl)
        if known.source.sha256 == source.sha256 and known.reuse == reuse and known.ttl == ttl:
            return known
        return await self.replace(known, source, reuse=reuse, positions=None, ttl=ttl, if_match=None)

    def find(self, name: str, tenant: Tenant, *, public: bool | None = None) -> SchemaRecord:
        """Return the schema that a name means to a tenant: its own, else a public one. Raises BodyError.

        Args:
            name: the schema's name.
            tenant: the caller.
            public: True for the public schema only, False for the tenant's own only.
        """
        record = self._named(name, tenant, public)
        if record is None:
            raise _unknown(name)
        return record

    def _named(self, name: str, tenant: Tenant, public: bool | None) -> SchemaRecord | None:
        owner = PUBLIC if public else _owner(tenant.salt)
        return self._records.find(name, owner) if public is None else self._records.get(name, owner)

    def own(self, name: str, tenant: Tenant, *, public: bool | None = None) -> SchemaRecord:
        """Return the schema of this name if the tenant may change it. Raises BodyError."""
        record = self.find(name, tenant, public=public)
        if record.public and not tenant.admin:
            raise BodyError(
                f"schema {name!r:.100} is public, and only an admin may change it; make one of your own by POST",
                code="admin_only",
                status=403,
            )
        return record

    def visible(self, tenant: Tenant) -> list[SchemaRecord]:
        """Return all schemas that a tenant can name, ordered by name, without the public ones that its own hide."""
        return [record for _, record in sorted(self._records.visible(_owner(tenant.salt)).items())]

    async def read(self, body: SchemaBody, tenant: Tenant) -> SchemaSource:
        """Parse the schema in a body. Raises BodyError and PMLError."""
        return await self._llm.pools.schemas.run(read_source, body, owner=tenant.salt)

    async def create(
        self,
        source: SchemaSource,
        *,
        salt: str | None,
        reuse: str | None,
        positions: str | None,
        ttl: str | None = None,
    ) -> SchemaRecord:
        """Register a new schema. Raises BodyError, and PMLError if it cannot be laid out."""
        name = source.schema.name
        async with self._locks[salt]:
            if self._records.get(name, _owner(salt)) is not None:
                raise BodyError(
                    f"there is a schema {name!r:.100} already; change it with PUT, or DELETE it first",
                    code="already_exists",
                    status=409,
                )
            self._check_quota(salt, source, None)
            return await self._keep(source, salt, reuse, positions, ttl, ())

    async def replace(
        self,
        before: SchemaRecord,
        source: SchemaSource,
        *,
        reuse: str | None,
        positions: str | None,
        if_match: str | None,
        ttl: str | None = None,
    ) -> SchemaRecord:
        """Create a new version of a schema. Running requests finish on the old one. Raises BodyError and PMLError."""
        async with self._locks[before.salt]:
            current = await self._current(before, if_match)
            self._check_quota(current.salt, source, current)
            async with self._ending(current):
                return await self._keep(source, current.salt, reuse, positions, ttl, self._past(current))

    async def remove(self, before: SchemaRecord, *, if_match: str | None) -> None:
        """Delete a schema. Running requests finish, its prewarm ends. Raises BodyError."""
        async with self._locks[before.salt]:
            record = await self._current(before, if_match)
            if self._keeper is not None and not await asyncio.to_thread(self._keeper.drop, KeptSchema.of(record)):
                raise _changed_elsewhere(record.name)
            async with self._ending(record):
                self._forget(record)

    async def refresh(self) -> None:
        """Load the changes of other servers that share the keeper."""
        keeper = self._keeper
        if keeper is None or not keeper.changed():
            return
        async with self._refreshing:
            if not keeper.changed():
                return
            kept = {(one.salt, one.name): one for one in await asyncio.to_thread(keeper.all)}
            for record in list(self._records):
                if (record.salt, record.name) not in kept:
                    async with self._locks[record.salt], self._ending(record):
                        self._forget(record)
            for one in kept.values():
                async with self._locks[one.salt]:
                    await self._adopt(one)

    async def _adopt(self, kept: KeptSchema) -> None:
        """Register a schema that another server has stored, unless this version is known."""
        known = self._records.get(kept.name, _owner(kept.salt))
        if known is not None and known.versions[-1] == kept.versions[-1]:
            return
        source = await self._llm.pools.schemas.run(of_text, kept.form, kept.text, owner=kept.salt)
        add = self._llm.add_schema
        async with self._ending(known):
            layout = await add(source.schema, encode=False, replace=True, cache_salt=kept.salt, ttl=kept.ttl)
            tokens = sum(len(run.ids) for run in layout.runs)
            said = kept.reuse, kept.positions, tokens, kept.versions, kept.ttl
            record = SchemaRecord(kept.name, kept.salt, source, layout, *said)
            self._prewarms.pop((kept.salt, kept.name), None)
            self._records.put(kept.name, _owner(kept.salt), record)

    def _forget(self, record: SchemaRecord) -> None:
        self._llm.remove_schema(record.name, cache_salt=record.salt)
        self._prewarms.pop((record.salt, record.name), None)
        self._records.remove(record.name, _owner(record.salt))

    @asynccontextmanager
    async def _ending(self, record: SchemaRecord | None) -> AsyncIterator[None]:
        """Run a block that deletes or replaces a schema. Then unpin its public segments that no other schema has.

        Only pins by key (``BY_KEY``) are removed, because tenants could no longer find these segments. Private segments
        stay visible to their tenant.

        Args:
            record: the schema that ends; None if there is none.
        """
        pinned: dict[bytes, SegmentSpec] = {}
        if record is not None and record.public:
            with suppress(InlayError):  # the engine may have been shut down meanwhile, here and below
                by_key = {spec.key for spec in await asyncio.wrap_future(self._llm.local.pinned(None))}
                had = await self._keys(record) if by_key else {}
                pinned = {key: spec for key, spec in had.items() if key in by_key}
        yield
        for other in self._records.of(PUBLIC):
            if not pinned:
                return
            kept = await self._keys(other)
            pinned = {key: spec for key, spec in pinned.items() if key not in kept}
        if pinned:
            with suppress(InlayError):
                request = self._llm.processor.encoding("segments", pinned.values())
                await asyncio.wrap_future(self._llm.local.unpin(request, None, BY_KEY))

    async def _keys(self, record: SchemaRecord) -> dict[bytes, SegmentSpec]:
        """Return the segments of a schema that can be encoded ahead, by key."""
        modules = {} if record.reuse is None else await self.segments(record)
        return {spec.key: spec for specs in modules.values() for spec in specs}

    async def prewarm(self, record: SchemaRecord, tenant: str = "") -> PrewarmTask:
        """Encode the missing modules of a schema, or join the task that already does. Raises BodyError.

        The task runs to its end even if no caller waits for it, unless the schema is replaced or deleted meanwhile.

        Args:
            record: the schema.
            tenant: the name of the calling tenant.
        """
        async with self._locks[record.salt]:  # waits for unfinished changes
            key = (record.salt, record.name)
            current = self._records.get(record.name, _owner(record.salt))
            if current is None:
                raise _unknown(record.name)
            if key not in self._prewarms or self._prewarms[key].over:
                self._prewarms[key] = PrewarmTask(self._llm, current, tenant)
            return self._prewarms[key]

    def prewarm_of(self, record: SchemaRecord) -> PrewarmTask | None:
        """Return the latest prewarm task of this version."""
        return self._prewarms.get((record.salt, record.name))

    async def stored(self, record: SchemaRecord) -> dict[str, tuple[int, int]]:
        """Return for each module the tokens that can be encoded ahead, and how many are stored. See AsyncLLM.stored."""
        if record.reuse is None:
            return {}
        try:
            async with self._looks[record.salt]:  # each look-up runs through all modules on a shared thread
                return await self._llm.stored(
                    record.name, reuse=record.reuse, positions=record.positions, cache_salt=record.salt
                )
        except ParameterError:  # it was deleted meanwhile
            return {}

    async def segments(self, record: SchemaRecord) -> dict[str, list[SegmentSpec]]:
        """Return for each module its segments that can be encoded ahead. The key "" is text outside modules.

        It is empty once the schema is deleted.
        """
        policy = self._llm.policy(record.reuse, record.positions, schema=record.layout.schema)
        find, scope = self._llm.processor.schemas.module_specs, Scope(record.salt or PUBLIC)
        try:
            return await self._llm.pools.schemas.run(find, record.name, policy, scope, owner=record.salt)
        except ParameterError:
            return {}

    async def pin(self, record: SchemaRecord, tenant: Tenant) -> int:
        """Pin the encoded segments of a schema, within the tenant's budget. See LLM.pin. Raises PinError."""
        return await self._llm.pin(
            record.name,
            reuse=record.reuse,
            positions=record.positions,
            cache_salt=record.salt,
            max_bytes=tenant.limits.max_pinned_bytes,
            tenant=tenant.name,
        )

    async def unpin(self, record: SchemaRecord, tenant: Tenant) -> bool:
        """Remove a tenant's pin of a schema. Returns True if there was one."""
        return await self._llm.unpin(record.name, cache_salt=record.salt, tenant=tenant.name)

    def is_pinned(self, record: SchemaRecord, tenant: Tenant) -> bool:
        """True if the tenant has pinned the schema."""
        return self._llm.schemas.has_pinned(record.name, Scope(record.salt or PUBLIC, tenant.name))

    async def evict(self, record: SchemaRecord) -> int:
        """Evict the encoded segments of a schema. See LLM.evict."""
        evict = self._llm.evict
        return await evict(record.name, reuse=record.reuse, positions=record.positions, cache_salt=record.salt)

    async def evict_named(self, name: str, tenant: Tenant, *, public: bool | None = None) -> tuple[bool, int]:
        """Evict the stored text of a schema, or of a removed schema of this name. See LLM.evict. Raises BodyError.

        Returns:
            True if the schema is public, and the number of evicted tokens.
        """
        record = self._named(name, tenant, public)
        if record is not None:
            record = self.own(name, tenant, public=public)
            return record.public, await self.evict(record)
        owner = PUBLIC if public else _owner(tenant.salt)
        if owner == PUBLIC and not tenant.admin:
            raise _unknown(name)
        try:
            return owner == PUBLIC, await self._llm.evict(name, cache_salt=owner or None)
        except ParameterError:
            raise _unknown(name) from None

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one stored token."""
        return self._llm.client.model.bytes_per_token

    async def _keep(
        self,
        source: SchemaSource,
        salt: str | None,
        reuse: str | None,
        positions: str | None,
        ttl: str | None,
        past: Sequence[SchemaVersion],
    ) -> SchemaRecord:
        schema = source.schema
        layout = await self._llm.add_schema(schema, encode=False, replace=True, cache_salt=salt, ttl=ttl)
        number = past[-1].version + 1 if past else 1
        versions = (*past, SchemaVersion(number, self._clock(), source.sha256))[-self._quotas.versions :]
        tokens = sum(len(run.ids) for run in layout.runs)
        record = SchemaRecord(schema.name, salt, source, layout, reuse, positions, tokens, versions, ttl)
        if self._keeper is not None and not await asyncio.to_thread(self._keeper.keep, KeptSchema.of(record)):
            raise _changed_elsewhere(schema.name)
        self._prewarms.pop((salt, schema.name), None)
        self._records.put(schema.name, _owner(salt), record)
        return record

    def _past(self, record: SchemaRecord) -> list[SchemaVersion]:
        """Return the past versions of a schema that gets a new one, with as many sources as the quota allows."""
        source = record.source
        now = dataclasses.replace(record.versions[-1], form=source.form, text=source.text)
        past = [*record.versions[:-1], now]
        others = (one for one in self._records.of(_owner(record.salt)) if one is not record)
        left = self._quotas.past_bytes - sum(version.size for one in others for version in one.versions)
        kept: list[SchemaVersion] = []
        for version in reversed(past):
            left -= version.size
            kept.append(version if left >= 0 else dataclasses.replace(version, form=None, text=None))
        return kept[::-1]

    async def _current(self, before: SchemaRecord, if_match: str | None) -> SchemaRecord:
        """Return the current record in place of an older one. Raises BodyError if it is gone or does not match."""
        key = (before.salt, before.name)
        if key in self._prewarms:
            await self._prewarms[key].begun()  # until then the task might register the old version again
        record = self._records.get(before.name, _owner(before.salt))
        if record is None:
            raise _unknown(before.name)
        if if_match is not None and not _matches(record, if_match):
            raise BodyError(
                f"If-Match does not name the current version of schema {record.name!r:.100}, which is "
                f"{record.version}, etag {record.etag}; GET it and try again",
                param="If-Match",
                code="version_mismatch",
                status=412,
            )
        return record

    def _check_quota(self, salt: str | None, source: SchemaSource, before: SchemaRecord | None) -> None:
        """Raise BodyError if the source exceeds the tenant's quota. ``before`` is the schema that it replaces."""
        others = [record for record in self._records.of(_owner(salt)) if record is not before]
        whose = "the server has" if salt is None else "you have"
        if len(others) >= self._quotas.schemas:
            raise _too_much(f"{whose} {len(others)} schemas, which is the limit; delete one first")
        size, most = sum(record.source.size for record in others) + source.size, self._quotas.source_bytes
        if size > most:
            raise _too_much(
                f"with this one {whose} schemas of {size:,} bytes, but the limit is {most:,}; delete one first"
            )


def _matches(record: SchemaRecord, if_match: str) -> bool:
    """True if an If-Match header names this version: by its ETag, by its number, or "*" for any."""
    named = [one.strip() for one in if_match.split(",")]
    return "*" in named or record.etag in named or str(record.version) in [one.strip('"') for one in named]


def _owner(salt: str | None) -> str:
    """Return the registry's name for the owner."""
    return PUBLIC if salt is None else salt


def _unknown(name: str) -> BodyError:
    """Return the error for an unknown schema. It is the same for another tenant's schema, which must not show."""
    return BodyError(f"there is no schema {name!r:.100}; GET /v1/schemas lists them", code="not_found", status=404)


def _changed_elsewhere(name: str) -> BodyError:
    message = f"another server has changed schema {name!r:.100} at the same moment; GET it and try again"
    return BodyError(message, code="version_mismatch", status=409)


def _too_much(message: str) -> BodyError:
    return BodyError(message, code="schema_limit", status=403)
