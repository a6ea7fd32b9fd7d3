"""The segments in a server's cache, as one tenant may see them.

A tenant sees its own segments, those of public schemas, and those that it has pinned, even after their schema is gone.
An admin also sees all public segments of the pool.

A segment belongs to a tenant if its key can be derived with the tenant's salt. So a tenant never sees another tenant's
segments.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from inlay.api.failures import BodyError
from inlay.client.async_llm import AsyncLLM
from inlay.client.local import InProcessClient
from inlay.errors import ParameterError
from inlay.kv.identity import SegmentSpec, made_under
from inlay.kv.lifetimes import BY_KEY
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.form import new_draft, write_all
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import TierMissError
from inlay.models.location import public_name
from inlay.prompt.contexts import PUBLIC
from inlay.prompt.request import EncodeRequest
from inlay.server.limits import Tenant
from inlay.server.schema_catalog import SchemaCatalog
from inlay.types import SegmentState

PER_TURN = 200  # segments that are looked up between two steps of the engine
_MOST_ROUNDS = 3  # rounds in which an eviction of everything looks for segments
_MOST_NAMED = 10  # the most segments that an error counts for an ambiguous key
#: The name of the primer in listings. It belongs to no schema.
PRIMER = "primer"


class _Seen(NamedTuple):
    """A possible segment or one of its encoded forms, with its schema and module."""

    spec: SegmentSpec
    schema: str | None = None
    module: str | None = None


class Evicted(NamedTuple):
    """The result of an eviction. ``size`` is in bytes. ``left`` counts public segments that only an admin may evict."""

    segments: int
    tokens: int
    size: int
    left: int


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A stored or pinned segment.

    Args:
        state: its place and size.
        spec: the lossless form of its specification.
        schema: its schema; None for a part of a message, or if the schema is gone.
        module: the path of its module; "" for text outside modules. PRIMER for the text that modules are encoded
        behind. private: it is the tenant's own.
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
    """The cache of one server.

    Args:
        llm: the model.
        schemas: the schemas that tenants can name.
    """

    def __init__(self, llm: AsyncLLM, schemas: SchemaCatalog) -> None:
        self._llm = llm
        self._schemas = schemas
        # One look-up per tenant at a time, because each runs through all its segments on shared threads.
        self._looking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def segments(
        self, tenant: Tenant, *, begun: str = "", after: str = "", limit: int | None = None
    ) -> list[StoredSegment]:
        """Return the segments that a tenant may see, ordered by key. It looks them up in batches until it has enough.

        Args:
            tenant: the caller.
            begun: the hexadecimal prefix of the keys.
            after: the last key before the first result.
            limit: the most segments to return; None for all.

        Raises:
            InlayError: the engine is a cluster.
        """
        found: list[StoredSegment] = []
        async with self._looking[tenant.name]:
            seen = await self._seen(tenant, begun, after)
            for first in range(0, len(seen), PER_TURN):
                some = seen[first : first + PER_TURN]
                wanted = self._request(one.spec for one in some)
                states = await asyncio.wrap_future(self._llm.local.look(wanted, tenant.name))
                for (spec, schema, module), state in zip(some, states, strict=True):
                    if state is not None:
                        found.append(StoredSegment(state, spec.lossless, schema, module, spec.before.private))
                if limit is not None and len(found) >= limit:
                    return found[:limit]
        return found

    async def _seen(self, tenant: Tenant, begun: str, after: str) -> list[_Seen]:
        """Return the possible segments in the order of keys. See ``segments``."""
        pool = await asyncio.wrap_future(self._llm.local.modules())
        pinned = await asyncio.wrap_future(self._llm.local.pinned(tenant.name))
        own = await self._llm.pools.schemas.run(self._own, pool, pinned, tenant, owner=tenant.salt)
        primer = self._llm.processor.schemas.is_primer
        named = {spec.key: _Seen(spec, module=PRIMER if primer(spec) else None) for spec in own}
        for record in self._schemas.visible(tenant):
            if record.reuse is not None:
                for module, specs in (await self._schemas.segments(record)).items():
                    named |= {spec.key: _Seen(spec, record.name, module) for spec in specs}
        in_order = partial(_in_order, named.values(), self._llm.local.residency.forms, begun, after)
        return await self._llm.pools.schemas.run(in_order, owner=tenant.salt)

    async def find(self, begun: str, tenant: Tenant) -> StoredSegment:
        """Return the tenant's visible segment whose key has this prefix. Raises BodyError for none or several."""
        found = await self.segments(tenant, begun=begun.lower(), limit=_MOST_NAMED)
        if len(found) != 1:
            several = f"{_MOST_NAMED} or more" if len(found) == _MOST_NAMED else f"{len(found)}"
            message = f"{several} segments that you may see have a key that begins with {begun!r:.80}"
            code, status = ("not_found", 404) if not found else ("ambiguous_key", 409)
            raise BodyError(f"{message}; GET /v1/cache/segments lists them", code=code, status=status)
        return found[0]

    async def evict(self, segment: StoredSegment, tenant: Tenant) -> int:
        """Evict a segment and return its tokens. Raises BodyError if it is public and the tenant is no admin."""
        if not segment.private and not tenant.admin:
            message = "the segment is public, and only an admin may evict it; evict your own segments"
            raise BodyError(message, code="admin_only", status=403)
        if segment.private:
            self._llm.processor.forget_texts(tenant.salt or "")
        return await asyncio.wrap_future(self._llm.schemas.evict(self._request([segment.spec])))

    async def evict_all(self, tenant: Tenant) -> Evicted:
        """Evict all segments of a tenant, and all text of its requests. An admin also evicts public ones."""
        segments = tokens = size = left = texts = 0
        for _ in range(_MOST_ROUNDS):  # requests that run meanwhile store more
            found = await self.segments(tenant)
            own = [one for one in found if one.private or tenant.admin or tenant.salt is None]
            left = len(found) - len(own)
            if not own:
                break
            for first in range(0, len(own), PER_TURN):
                some = own[first : first + PER_TURN]
                specs = {one.spec.key: one.spec for one in some}
                tokens += await asyncio.wrap_future(self._llm.schemas.evict(self._request(specs.values())))
                size += sum(one.state.tokens for one in some) * self._llm.client.model.bytes_per_token
                segments += len(some)
        for record in self._schemas.visible(tenant):  # their names reach files of earlier versions, too
            if tenant.admin or tenant.salt is None or not record.public:
                with suppress(ParameterError):  # it was deleted meanwhile
                    texts += await self._schemas.evict(record)
        # No list shows what earlier processes have stored.
        for owner in {tenant.salt or PUBLIC, *((PUBLIC,) if tenant.admin else ())}:
            texts += await asyncio.wrap_future(self._llm.schemas.evict_owner(owner))
        self._llm.processor.forget_texts(tenant.salt or "")
        texts += await asyncio.wrap_future(self._llm.local.evict_texts(tenant.salt or ""))
        return Evicted(segments, tokens + texts, size + texts * self._llm.client.model.bytes_per_token, left)

    async def pin(self, segment: StoredSegment, tenant: Tenant) -> int:
        """Pin a segment in the pool. Returns the bytes of all the tenant's pins. Raises PinError."""
        request, most = self._request([segment.spec]), tenant.limits.max_pinned_bytes
        return await asyncio.wrap_future(self._llm.local.pin(request, tenant.name, BY_KEY, most))

    async def unpin(self, segment: StoredSegment, tenant: Tenant) -> int:
        """Remove a tenant's pin. Returns the bytes of its other pins."""
        request = self._request([segment.spec])
        return await asyncio.wrap_future(self._llm.local.unpin(request, tenant.name, BY_KEY))

    def row(self, segment: StoredSegment, tenant: Tenant) -> dict[str, Any]:
        """Return a segment as an entry of a list. It hides the uses of public segments, made by all tenants."""
        state, alone = segment.state, segment.private or tenant.admin or tenant.salt is None
        return {
            "key": segment.key,
            "model": public_name(self._llm.model_name),
            "schema": segment.schema,
            "module": segment.module,
            "private": segment.private,
            "tokens": state.tokens,
            "bytes": state.tokens * self._llm.client.model.bytes_per_token,
            "codec": state.codec,
            "context_tokens": segment.spec.before.tokens,
            "tiers": list(state.tiers),
            "uses": state.uses if alone else None,
            "idle_s": round(state.idle_s, 3) if alone and state.idle_s is not None else None,
            "pinned": state.pinned,
            "ttl_s": None if state.ttl_s is None else round(state.ttl_s, 3),
        }

    # The store on disk

    def on_disk(self) -> tuple[int, int, int] | None:
        """Return the segments, tokens and bytes of this model on disk; None if the engine runs in another process."""
        if not isinstance(self._llm.client, InProcessClient):
            return None
        return self._disk().held_of(self._llm.client.model.keys.fingerprint)

    async def verify(self) -> tuple[int, list[str]]:
        """Read every file and remove damaged ones. Returns the number of valid files, and the problems."""
        found = await asyncio.to_thread(lambda disk: [*disk.verify_all()], self._disk())
        problems = [problem for problem in found if problem is not None]
        return len(found) - len(problems), problems

    def file(self, segment: StoredSegment) -> Path:
        """Return the path of a segment's file. Raises BodyError if it has none."""
        disk = self._disk()
        if "disk" not in segment.state.tiers:
            raise BodyError("the segment has no file in the store", code="not_found", status=404)
        path = disk.path(segment.state.key)
        if not path.is_file():  # another process has removed it
            raise BodyError("the segment's file has gone from the store", code="not_found", status=404)
        return path

    async def take(self, pieces: AsyncIterator[bytes]) -> SegmentRecord:
        """Check a segment file and add it to the store.

        If a write fails, the rest of the body is read first. A client that is still sending might not see the answer
        otherwise.

        Raises:
            BodyError: the file is too large or invalid.
            OSError: the folder cannot be written.
        """
        disk, size = self._disk(), 0
        refused: OSError | None = None
        with new_draft(disk.folder) as (draft, file):
            async for piece in pieces:
                size += len(piece)
                if size > disk.quota:
                    message = (
                        f"the file has more than {disk.quota:,} bytes, the size of the store; make the store larger"
                    )
                    raise BodyError(message, code="body_too_large", status=413)
                if refused is None:
                    try:
                        await asyncio.to_thread(write_all, file, memoryview(piece))
                    except OSError as error:
                        refused = error
            if refused is not None:
                raise refused
            try:
                return await asyncio.to_thread(disk.adopt, draft)
            except TierMissError as miss:
                message = f"the file is not a segment, or it is damaged: {miss}"
                raise BodyError(message, code="invalid_file") from None

    def _disk(self) -> DiskTier:
        tiers = self._llm.local.residency.tiers
        found = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
        if found is None:
            message = "this server keeps no store on disk; start it with --store PATH"
            raise BodyError(message, code="no_store", status=409)
        return found

    def _own(self, pool: Sequence[SegmentSpec], pinned: Sequence[SegmentSpec], tenant: Tenant) -> list[SegmentSpec]:
        """Return a tenant's segments in the pool and below, and its pinned ones.

        Public segments of the pool are included for an admin, and on a server without keys. Pinned public segments are
        always included.
        """
        keys, salt = self._llm.client.model.keys, tenant.salt

        def may_see(spec: SegmentSpec, public: bool) -> bool:
            if not spec.before.private:
                return public
            return salt is not None and made_under(spec, keys, salt.encode())

        all_public = tenant.admin or salt is None
        return [spec for spec in pool if may_see(spec, all_public)] + [spec for spec in pinned if may_see(spec, True)]

    def _request(self, specs: Any) -> EncodeRequest:
        return self._llm.processor.encoding("segments", specs)


def _in_order(
    named: Iterable[_Seen], forms: Callable[[SegmentSpec], Iterable[SegmentSpec]], begun: str, after: str
) -> list[_Seen]:
    """Return these segments and their forms, ordered by key, with this key prefix and after this key."""
    found = (one._replace(spec=form) for one in named for form in forms(one.spec))
    chosen = ((key, one) for one in found if (key := one.spec.key.hex()).startswith(begun) and key > after)
    return [one for _, one in sorted(chosen, key=itemgetter(0))]
