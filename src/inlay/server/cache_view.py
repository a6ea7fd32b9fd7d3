"""What a server's cache holds, as one tenant may see it: its own segments, and those of public schemas.

Whose a segment is follows from its key, which is worked out anew with the tenant's salt: nobody else's is ever shown.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.api.failures import BodyError
from inlay.async_llm import AsyncLLM
from inlay.kv.identity import SegmentSpec, made_under
from inlay.kv.pins import BY_KEY
from inlay.kv.tiers.disk import DiskTier
from inlay.kv.tiers.record import SegmentRecord
from inlay.kv.tiers.tier import Miss, TierMissError
from inlay.prompt.request import EncodeRequest
from inlay.server.limits import Tenant
from inlay.server.schema_catalog import SchemaCatalog
from inlay.types import SegmentState


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment that lies somewhere. schema, module: what it is encoded of; None for a part of a message.

    private: whether it is the tenant's own.
    """

    state: SegmentState
    spec: SegmentSpec
    schema: str | None
    module: str | None
    private: bool

    @property
    def key(self) -> str:
        return self.state.key.hex()


class CacheView:
    """The cache of one server. llm: whose. schemas: those that tenants may name."""

    def __init__(self, llm: AsyncLLM, schemas: SchemaCatalog) -> None:
        self._llm = llm
        self._schemas = schemas
        self._looking = asyncio.Lock()  # each goes through all that a tenant has

    async def segments(self, tenant: Tenant) -> list[StoredSegment]:
        """What a tenant may see, by key. Raises InlayError on a cluster."""
        async with self._looking:
            named: dict[bytes, tuple[SegmentSpec, str | None, str | None]] = {}
            for record in self._schemas.visible(tenant):
                if record.reuse is not None:
                    for module, specs in (await self._schemas.segments(record)).items():
                        named |= {spec.key: (spec, record.name, module) for spec in specs}
            pool = await asyncio.wrap_future(self._llm.client.modules())
            own = await self._llm.pools.schemas.run(self._own, pool, tenant, owner=tenant.salt)
            named = {spec.key: (spec, None, None) for spec in own} | named
            rows = list(named.values())
            wanted = self._request(spec for spec, _, _ in rows)
            states = await asyncio.wrap_future(self._llm.client.look(wanted, tenant.name))
        found = [
            StoredSegment(state, spec, schema, module, spec.before.private)
            for (spec, schema, module), forms in zip(rows, states, strict=True)
            for state in forms
        ]
        return sorted(found, key=lambda segment: segment.key)

    async def find(self, begun: str, tenant: Tenant) -> StoredSegment:
        """The one segment that a tenant may see whose key begins so. Raises BodyError."""
        found = [segment for segment in await self.segments(tenant) if segment.key.startswith(begun.lower())]
        if len(found) != 1:
            message = f"{len(found)} segments that you may see have a key that begins with {begun!r:.80}"
            code, status = ("not_found", 404) if not found else ("ambiguous_key", 409)
            raise BodyError(f"{message}; GET /v1/cache/segments lists them", code=code, status=status)
        return found[0]

    async def evict(self, segment: StoredSegment, tenant: Tenant) -> int:
        """Forget a segment; returns its tokens. Raises BodyError for one that is everybody's, but for an admin."""
        if not segment.private and not tenant.admin:
            message = "the segment is of a public schema, and only an admin may evict it; evict your own"
            raise BodyError(message, code="admin_only", status=403)
        return await asyncio.wrap_future(self._llm.schemas.evict(self._request([segment.spec])))

    async def pin(self, segment: StoredSegment, tenant: Tenant) -> int:
        """Keep a segment in the pool, from when it is there; returns what the tenant's pins take. Raises PinError."""
        request, most = self._request([segment.spec]), tenant.limits.max_pinned_bytes
        return await asyncio.wrap_future(self._llm.client.pin(request, tenant.name, BY_KEY, most))

    async def unpin(self, segment: StoredSegment, tenant: Tenant) -> int:
        """Let a tenant's pin of a segment go; returns what its other pins take."""
        request = self._request([segment.spec])
        return await asyncio.wrap_future(self._llm.client.unpin(request, tenant.name, BY_KEY))

    def row(self, segment: StoredSegment) -> dict[str, Any]:
        """A segment as the API shows it in a list."""
        state = segment.state
        return {
            "key": segment.key,
            "model": self._llm.model_name,
            "schema": segment.schema,
            "module": segment.module,
            "private": segment.private,
            "tokens": state.tokens,
            "bytes": state.tokens * self._llm.client.model.bytes_per_token,
            "codec": state.codec,
            "tiers": list(state.tiers),
            "uses": state.uses,
            "pinned": state.pinned,
            "ttl_s": None if state.ttl_s is None else round(state.ttl_s, 3),
        }

    # The store on disk

    async def verify(self) -> tuple[int, list[str]]:
        """Read every file, and remove those that are damaged; how many are whole, and what was wrong with others."""
        return await asyncio.to_thread(_verify, self._disk())

    def file(self, segment: StoredSegment) -> Path:
        """Where the file of a segment lies. Raises BodyError where it has none."""
        disk = self._disk()
        if "disk" not in segment.state.tiers:
            raise BodyError("the segment has no file in the store", code="not_found", status=404)
        return disk.path(segment.state.key)

    async def take(self, pieces: AsyncIterator[bytes]) -> SegmentRecord:
        """Take in a file of a segment, once it is checked. Raises BodyError."""
        disk = self._disk()
        draft, size = disk.folder / f".draft-import-{os.getpid()}-{secrets.token_hex(8)}", 0
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                async for piece in pieces:
                    size += len(piece)
                    if size > disk.quota:
                        message = f"the file has more than the {disk.quota:,} bytes that the store may hold"
                        raise BodyError(message, code="body_too_large", status=413)
                    await asyncio.to_thread(file.write, piece)
            return await asyncio.to_thread(disk.adopt, draft)
        except TierMissError as miss:
            raise BodyError(f"it is no file of a segment, or is damaged: {miss}", code="invalid_file") from None
        finally:
            draft.unlink(missing_ok=True)

    def _disk(self) -> DiskTier:
        tiers = self._llm.local.residency.tiers
        found = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
        if found is None:
            message = "this server keeps no store on disk; start it with --store PATH"
            raise BodyError(message, code="no_store", status=409)
        return found

    def _own(self, pool: tuple[SegmentSpec, ...], tenant: Tenant) -> list[SegmentSpec]:
        """Those that are a tenant's; where there are no keys, or for the operator's, those that are nobody's."""
        if tenant.salt is None:
            return [spec for spec in pool if not spec.before.private]
        keys, salt = self._llm.client.model.keys, tenant.salt.encode()
        return [spec for spec in pool if spec.before.private and made_under(spec, keys, salt)]

    def _request(self, specs: Any) -> EncodeRequest:
        return self._llm.processor.encoding("segments", specs)


def _verify(disk: DiskTier) -> tuple[int, list[str]]:
    whole, problems = 0, []
    for entry in list(disk.iterate()):
        try:
            disk.verify(entry.key)
            whole += 1
        except (TierMissError, OSError) as error:
            gone = isinstance(error, TierMissError) and error.reason is Miss.CORRUPT and disk.drop(entry.key)
            problems.append(f"{entry.key.hex()}: {error}{'; removed' if gone else ''}")
    return whole, problems
