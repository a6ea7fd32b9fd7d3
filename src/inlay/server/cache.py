"""``/v1/cache``: the stored segments of a tenant, and public ones. See docs/guides/cache-tiers.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from inlay.api.failures import BodyError, not_an_object
from inlay.api.openai import Endpoint
from inlay.client.warm_plan import MOST_TEXTS
from inlay.errors import PinError
from inlay.models.location import public_name
from inlay.policy import FIELDS as POLICY_FIELDS
from inlay.prompt.seen_pieces import is_hash
from inlay.server.completions import check_name, policy_of, read_call
from inlay.server.errors import JSONBytes
from inlay.server.limits import Tenant
from inlay.server.schema_record import NO_BODY, RESPONSES
from inlay.server.schemas import asking
from inlay.wording import shown

if TYPE_CHECKING:
    from inlay.server.service import Service

router = APIRouter(prefix="/v1/cache")

_asking = partial(asking, only=(), body=({}, None))

_SLOW_S, _SLOW_BYTES_PER_S = 30.0, 2**20 / 64  # seconds for every file to arrive, and the rate for larger ones

#: The fields of /v1/cache/score.
SCORE_FIELDS = ("texts", "hashes", "messages", "alone", "model", "reuse", "positions", *POLICY_FIELDS)
SCORE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "oneOf": [{"required": ["texts"]}, {"required": ["hashes"]}],
                    "properties": {name: {"type": ["string", "number", "boolean", "null"]} for name in SCORE_FIELDS[4:]}
                    | {
                        "texts": {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": MOST_TEXTS,
                            "items": {"type": "string"},
                            "description": "candidates, such as retrieved documents",
                        },
                        "hashes": {
                            "type": "array",
                            "minItems": 1,
                            "maxItems": MOST_TEXTS,
                            "items": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                            "description": "in place of texts, the sha256 of their UTF-8 bytes",
                        },
                        "messages": {
                            "type": "array",
                            "items": {"type": "object"},
                            "description": "the messages in front of each text, usually the system message",
                        },
                        "alone": {
                            "type": "boolean",
                            "description": "true if each text will be the only marked part of its message",
                        },
                    },
                }
            }
        },
    }
}

Limit = Annotated[int, Query(ge=1, le=1000, description="how many to list")]


@router.get("", responses=RESPONSES)
async def stats(request: Request) -> Response:
    """The usage of the pool and the tiers below it, for all tenants together, and the pinned bytes.

    A folder may have segments of other models. Only the field ``all_models`` of the folder counts them.
    """
    service, tenant = _asking(request)
    service.meter.count(tenant)
    found = service.llm.stats()
    tiers = {
        name: None if tier is None else asdict(tier)
        for name, tier in (("host", found.host), ("disk", found.disk), ("shared", found.shared))
    }
    if tiers["disk"] is not None and (mine := service.cache.on_disk()) is not None:
        counts = ("segments", "tokens", "bytes")
        tiers["disk"]["all_models"] = {name: tiers["disk"][name] for name in counts}
        tiers["disk"] |= dict(zip(counts, mine, strict=True))
    per_token = service.llm.client.model.bytes_per_token
    pool = {"segments": found.segments, "tokens": found.stored_tokens, "bytes": found.stored_tokens * per_token}
    pool |= {"chunks": found.chunks, "used_chunks": found.used_chunks, "pinned_bytes": found.pinned_bytes}
    said = {"object": "cache", "model": public_name(service.llm.model_name), "admin": tenant.admin}
    return JSONBytes({**said, "pool": pool, **tiers})


@router.post("/score", responses=RESPONSES, openapi_extra=SCORE_BODY)
async def score(request: Request) -> Response:
    """What each text would find in the cache as a marked part of a message. Own and public texts count."""
    service: Service = request.app.state.service
    tenant: Tenant = request.state.tenant
    body = request.state.body
    async with service.meter.request(tenant, tokens=False):
        texts, hashes, messages, chat = _score_request(body)
        call = (
            await read_call(service, Endpoint.CHAT, chat, tenant=tenant, size=max(1, request.state.body_bytes))
        ).call
        check_name(call.model, service)
        found = await service.llm.score_cached(
            texts,
            hashes=hashes,
            messages=messages,
            alone=body.get("alone", False),
            reuse=policy_of(call, tenant, service),
            cache_salt=tenant.salt,
            adapter=call.model if call.model in service.llm.adapters else None,
        )
    data = [
        {"index": number, **asdict(one), "resident_tokens": one.resident_tokens} for number, one in enumerate(found)
    ]
    seconds = [one.compute_s for one in found if one.compute_s is not None]
    return JSONBytes({"object": "list", "compute_s": sum(seconds) if seconds else None, "data": data})


def _score_request(body: Any) -> tuple[list[str], list[str], list[Any], dict[str, Any]]:
    """Return texts or hashes, the messages in front of them, and a chat request with the other fields.

    Raises:
        BodyError: for a wrong body.
    """
    if not isinstance(body, Mapping):
        raise not_an_object(body, '{"texts": […]} or {"hashes": […]}')
    for name in body:
        if name not in SCORE_FIELDS:
            message = f"/v1/cache/score takes no field {shown(name)}; it takes {', '.join(SCORE_FIELDS)}"
            raise BodyError(message, param=str(name), code="unknown_field")
    texts, messages = body.get("texts"), body.get("messages") or []
    if "hashes" in body:
        hashes = body["hashes"]
        if texts is not None:
            raise BodyError("texts and hashes are both given; give one of them", param="hashes")
        if not isinstance(hashes, list) or not hashes or not all(map(is_hash, hashes)):
            message = f"hashes is {shown(hashes)}; it must be a list of sha256, 64 digits 0-9a-f each"
            raise BodyError(message, param="hashes")
        texts = []
    else:
        hashes = []
        if not isinstance(texts, list) or not texts:
            raise BodyError(f"texts is {shown(texts)}; it must be a list of one or more texts", param="texts")
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise BodyError(f"texts[{number}] is {shown(text)}; it must be a text", param="texts")
    if not isinstance(messages, list):
        raise BodyError(f"messages is {shown(messages)}; it must be a list", param="messages")
    if not isinstance(body.get("alone", False), bool):
        raise BodyError(f"alone is {shown(body['alone'])}; it must be true or false", param="alone")
    part = {"type": "text", "text": "a text", "cache_control": {"type": "ephemeral"}}
    chat = {name: value for name, value in body.items() if name not in ("texts", "hashes", "alone")}
    return texts, hashes, messages, {**chat, "messages": [*messages, {"role": "user", "content": [part]}]}


@router.get("/segments", responses=RESPONSES)
async def segments(request: Request, limit: Limit = 100, after: str = "") -> Response:
    """A page of the segments that the tenant may see, by key."""
    service, tenant = _asking(request, only=("limit", "after"))
    async with service.meter.request(tenant, tokens=False):
        found = await service.cache.segments(tenant, after=after, limit=limit + 1)
    data = [service.cache.row(one, tenant) for one in found[:limit]]
    return JSONBytes({"object": "list", "data": data, "has_more": len(found) > limit})


@router.get("/segments/{key}", responses=RESPONSES)
async def one_segment(request: Request, key: str) -> Response:
    """One segment in detail, with its token ids."""
    service, tenant = _asking(request)
    async with service.meter.request(tenant, tokens=False):
        found = await service.cache.find(key, tenant)
    spec = found.spec
    made = {
        "ids": list(spec.ids),
        "start": spec.start,
        "adapter": spec.before.adapter.hex(),
    }
    return JSONBytes({"object": "segment", **service.cache.row(found, tenant), **made})


@router.delete("/segments/{key}", responses=RESPONSES)
async def evict(request: Request, key: str) -> Response:
    service, tenant = _asking(request)
    async with service.meter.request(tenant, tokens=False):
        found = await service.cache.find(key, tenant)
        tokens = await service.cache.evict(found, tenant)
    return JSONBytes({"object": "segment.evicted", "key": found.key, "evicted_tokens": tokens})


@router.delete("/segments", responses=RESPONSES)
async def evict_all(request: Request) -> Response:
    """Evict all segments of the tenant, and text that no list shows. An admin also evicts public segments."""
    service, tenant = _asking(request)
    async with service.meter.request(tenant, tokens=False):
        gone = await service.cache.evict_all(tenant)
    said = {"evicted_segments": gone.segments, "evicted_tokens": gone.tokens, "evicted_bytes": gone.size}
    return JSONBytes({"object": "cache.evicted", **said, "public_segments_left": gone.left})


@router.put("/segments/{key}/pin", openapi_extra=NO_BODY, responses=RESPONSES)
async def pin(request: Request, key: str) -> Response:
    service, tenant = _asking(request)
    async with service.meter.request(tenant, tokens=False):
        found = await service.cache.find(key, tenant)
        try:
            taken = await service.cache.pin(found, tenant)
        except PinError as error:
            raise BodyError(str(error), code="pin_limit", status=403) from None
    return JSONBytes({"object": "segment.pin", "key": found.key, "pinned": True, "pinned_bytes": taken})


@router.delete("/segments/{key}/pin", responses=RESPONSES)
async def unpin(request: Request, key: str) -> Response:
    service, tenant = _asking(request)
    async with service.meter.request(tenant, tokens=False):
        found = await service.cache.find(key, tenant)
        taken = await service.cache.unpin(found, tenant)
    return JSONBytes({"object": "segment.pin", "key": found.key, "pinned": False, "pinned_bytes": taken})


@router.get("/segments/{key}/file", responses=RESPONSES)
async def file(request: Request, key: str) -> Response:
    """The file of a segment in the store, byte for byte."""
    service, tenant = _asking(request)
    async with service.meter.request(tenant, tokens=False):
        path = service.cache.file(await service.cache.find(key, tenant))
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


@router.post("/verify", openapi_extra=NO_BODY, responses=RESPONSES)
async def verify(request: Request) -> Response:
    """Check every file of the store, for all tenants."""
    service, tenant = _asking(request)
    _check_admin(tenant, "read every file of the store")
    async with service.meter.request(tenant, tokens=False):
        whole, problems = await service.cache.verify()
    return JSONBytes({"object": "cache.verified", "whole": whole, "damaged": len(problems), "problems": problems})


@router.post("/files", responses=RESPONSES)
async def take(request: Request) -> Response:
    """Add a segment's file, sent as the body, to the store."""
    service: Service = request.app.state.service
    tenant: Tenant = request.state.tenant
    _check_admin(tenant, "put files into the store")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/octet-stream":
        raise BodyError(
            f"Content-Type is {kind!r:.60}; send the file with 'Content-Type: application/octet-stream'",
            code="unsupported_media_type",
            status=415,
        )
    async with service.meter.request(tenant, tokens=False):
        record = await service.cache.take(_in_time(request))
    return JSONBytes({"object": "segment.imported", "key": record.key.hex(), "tokens": record.tokens})


async def _in_time(request: Request) -> AsyncIterator[bytes]:
    """Yield the pieces of a body. Raises BodyError if they arrive too slowly."""
    loop = asyncio.get_running_loop()
    began, size = loop.time(), 0
    pieces = request.stream()
    while True:
        try:
            async with asyncio.timeout_at(began + _SLOW_S + size / _SLOW_BYTES_PER_S):
                piece = await anext(pieces, None)
        except TimeoutError:
            sentence = f"the body came too slowly, {size:,} bytes so far; send it faster"
            raise BodyError(sentence, code="request_timeout", status=408) from None
        if piece is None:
            return
        size += len(piece)
        yield piece


def _check_admin(tenant: Tenant, what: str) -> None:
    if not tenant.admin:
        raise BodyError(f"only an admin may {what}; ask the operator of this server", code="admin_only", status=403)
