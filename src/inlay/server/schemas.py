"""``/v1/schemas``: create, list, change, delete and encode schemas. See docs/guides/schemas-over-http.md."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from inlay.api.dialect import Dialect
from inlay.api.failures import BodyError, failure_of
from inlay.authoring.lint import Finding, lint_schema
from inlay.errors import ParameterError, PinError, PMLError
from inlay.pml.problems import JSONPlace
from inlay.policy import AUTO, CONTEXTS, PolicyFields, ReusePolicy, log_deprecated
from inlay.prompt.inputs import parse_ttl
from inlay.server.errors import JSONBytes, failure_response, json_bytes
from inlay.server.limits import Tenant
from inlay.server.routes import ADVICE, route_of
from inlay.server.schema_catalog import SchemaCatalog
from inlay.server.schema_record import (
    BODY,
    MODULES,
    NO_BODY,
    RESPONSES,
    GivenSchema,
    Page,
    PrewarmTask,
    SchemaOptions,
    SchemaRecord,
    check_name,
    detail,
    encoding,
    past_source,
    summary,
)
from inlay.server.threads import json_response

if TYPE_CHECKING:
    from inlay.server.limits import AdmittedRequest
    from inlay.server.service import Service

router = APIRouter(prefix="/v1/schemas")
Limit = Annotated[int, Query(ge=1, le=100, description="how many to list")]
Modules = Annotated[int, Query(ge=1, le=MODULES, description="how many modules to show")]
After = Annotated[str, Query(description="the module behind which to begin")]
Public = Annotated[bool | None, Query(description="true for the public schema of that name, false for your own")]
_MODULE_BYTES = 200  # approximate bytes of one module in a response


@router.post("", status_code=201, openapi_extra=BODY, responses=RESPONSES)
async def create(request: Request) -> Response:
    service, tenant = asking(request)
    given = GivenSchema(request.scope["state"], request.query_params)
    _check_ttl(given.options)
    salt = None if _is_public(given.options.public, tenant) else tenant.salt
    reuse = _policy(given.options, tenant, service)
    async with service.meter.request(tenant) as admission:
        admission.hold(tokens=_to_encode(given, reuse, tenant))
        try:
            source = await service.schemas.read(given.taken(), tenant)
            said: dict[str, Any] = {"positions": given.options.positions, "ttl": given.options.ttl}
            record = await service.schemas.create(source, salt=salt, reuse=reuse, **said)
        except PMLError as error:
            return _refused(error, given.field, request.scope)
        await _encode(service.schemas, record, given.options, tenant, admission)
        return await _response(service, record, tenant, _dialect(request), status=201)


@router.get("", responses=RESPONSES)
async def all_schemas(request: Request, limit: Limit = 20, after: str = "") -> Response:
    service, tenant = asking(request, only=("limit", "after"))
    async with service.meter.request(tenant, tokens=False):
        left = [record for record in service.schemas.visible(tenant) if record.name > after]
        data = [summary(record) for record in left[:limit]]
    names = [one["name"] for one in data] or [None]
    return JSONBytes(
        {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": len(left) > limit}
    )


@router.get("/{name}", responses=RESPONSES)
async def one_schema(
    request: Request,
    name: str,
    public: Public = None,
    source: bool = False,
    limit: Modules = MODULES,
    after: After = "",
) -> Response:
    service, tenant = asking(request, only=("public", "source", "limit", "after"))
    async with service.meter.request(tenant, tokens=False):
        record = service.schemas.find(name, tenant, public=public)
        page = Page(after, limit)
        return await _response(service, record, tenant, _dialect(request), source=source, page=page)


@router.put("/{name}", openapi_extra=BODY, responses=RESPONSES)
async def replace(request: Request, name: str) -> Response:
    service, tenant = asking(request)
    given = GivenSchema(request.scope["state"], request.query_params)
    _check_ttl(given.options)
    before = service.schemas.own(name, tenant, public=given.options.public)
    reuse = _policy(given.options, tenant, service)
    async with service.meter.request(tenant) as admission:
        admission.hold(tokens=_to_encode(given, reuse, tenant))
        try:
            source = await service.schemas.read(given.taken(), tenant)
            check_name(source, name)
            record = await service.schemas.replace(
                before,
                source,
                reuse=reuse,
                positions=given.options.positions,
                ttl=given.options.ttl,
                if_match=request.headers.get("if-match"),
            )
        except PMLError as error:
            return _refused(error, given.field, request.scope)
        await _encode(service.schemas, record, given.options, tenant, admission)
        return await _response(service, record, tenant, _dialect(request))


@router.delete("/{name}", responses=RESPONSES)
async def delete(request: Request, name: str, public: Public = None) -> Response:
    service, tenant = asking(request, only=("public",))
    record = service.schemas.own(name, tenant, public=public)
    await service.schemas.remove(record, if_match=request.headers.get("if-match"))
    return JSONBytes({"object": "schema.deleted", "name": name, "public": record.public, "deleted": True})


@router.post("/{name}/warm", openapi_extra=NO_BODY, responses=RESPONSES)
async def warm(request: Request, name: str, public: Public = None, stream: bool = False) -> Response:
    _check_meant(request)
    service, tenant = asking(request, only=("public", "stream"), body=({}, None))
    record = service.schemas.find(name, tenant, public=public)
    async with service.meter.request(tenant) as admission:
        missing = await _missing(service.schemas, record)
        admission.hold(tokens=missing)  # other requests of the tenant may have used its tokens meanwhile
        admission.tokens(missing)
        task = await service.schemas.prewarm(record, tenant.name)
    if stream or "text/event-stream" in request.headers.get("accept", ""):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            progress_events(service.schemas, task, _dialect(request)), media_type="text/event-stream", headers=headers
        )
    await task.result()
    if task.failure is not None:
        return failure_response(task.failure, request.scope)
    return JSONBytes(await _outcome(service.schemas, task, _dialect(request)))


@router.get("/{name}/versions/{version}", responses=RESPONSES)
async def one_version(request: Request, name: str, version: int, public: Public = None) -> Response:
    service, tenant = asking(request, only=("public",))
    async with service.meter.request(tenant, tokens=False):
        record = service.schemas.find(name, tenant, public=public)
        found = next((one for one in record.versions if one.version == version), None)
        if found is None:
            message = (
                f"schema {name!r:.100} has no version {version}, or it is too old; GET the schema for its versions"
            )
            raise BodyError(message, code="not_found", status=404)
        current = version == record.version
        source = {record.source.form: record.source.document()} if current else past_source(found)
        shown = {"version": version, "created": int(found.created), "sha256": found.sha256}
        return JSONBytes({"object": "schema.version", "name": name, **shown, "source": source})


@router.put("/{name}/pin", openapi_extra=NO_BODY, responses=RESPONSES)
async def pin(request: Request, name: str, public: Public = None) -> Response:
    service, tenant = asking(request, only=("public",), body=({}, None))
    record = service.schemas.find(name, tenant, public=public)
    if record.reuse is None:
        raise BodyError(
            "modules are not allowed, so the schema is not encoded ahead; there is nothing to pin",
            code="reuse_not_allowed",
            status=403,
        )
    async with service.meter.request(tenant) as admission:
        missing = await _missing(service.schemas, record)
        admission.hold(tokens=missing)
        admission.tokens(missing)
        try:
            taken = await service.schemas.pin(record, tenant)
        except PinError as error:
            raise BodyError(str(error), code="pin_limit", status=403) from None
    said = {"name": name, "public": record.public, "pinned": True, "pinned_bytes": taken}
    return JSONBytes({"object": "schema.pin", **said, "max_pinned_bytes": tenant.limits.max_pinned_bytes})


@router.delete("/{name}/pin", responses=RESPONSES)
async def unpin(request: Request, name: str, public: Public = None) -> Response:
    service, tenant = asking(request, only=("public",))
    async with service.meter.request(tenant, tokens=False):
        record = service.schemas.find(name, tenant, public=public)
        was = await service.schemas.unpin(record, tenant)
    said = {"name": name, "public": record.public, "pinned": False, "was_pinned": was}
    return JSONBytes({"object": "schema.pin", **said})


@router.delete("/{name}/stored", responses=RESPONSES)
async def evict(request: Request, name: str, public: Public = None) -> Response:
    service, tenant = asking(request, only=("public",))
    async with service.meter.request(tenant, tokens=False):
        is_public, tokens = await service.schemas.evict_named(name, tenant, public=public)
    return JSONBytes({"object": "schema.evicted", "name": name, "public": is_public, "evicted_tokens": tokens})


def _check_ttl(options: SchemaOptions) -> None:
    """Raise BodyError for an invalid ttl."""
    if options.ttl is not None:
        try:
            parse_ttl(options.ttl)
        except ParameterError as error:
            raise BodyError(str(error), param="ttl") from None


def asking(
    request: Request, only: tuple[str, ...] | None = None, body: tuple[Any, ...] = (None,)
) -> tuple[Service, Tenant]:
    """Return the service and the tenant of a request.

    Args:
        request: the request.
        only: the allowed query parameters; None skips the checks of query and body.
        body: the allowed bodies.
    """
    if only is not None:
        for name in request.query_params:
            if name not in only:
                may = f"may hold {', '.join(only)}" if only else "is to be empty"
                raise BodyError(f"the query holds {name!r:.60}; it {may}", param="query")
        if request.state.body not in body:
            takes = "no body; leave it out" if len(body) == 1 else "an empty object as its body; send {}"
            raise BodyError(f"this takes {takes}", code="unexpected_body")
    return request.app.state.service, request.state.tenant


def _dialect(request: Request) -> Dialect:
    """Return the dialect of the path's failures."""
    return route_of(request.scope["path"]).dialect


def _check_meant(request: Request) -> None:
    """Refuse a request that a web page could make its visitor's browser send without a preflight request.

    A request without a body has no content type for BodyMiddleware to check. Either header forces a preflight request.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and "authorization" not in request.headers:
        raise BodyError(
            "there is no Content-Type, and a web page could send such a request; send {} with "
            "'Content-Type: application/json'",
            code="unsupported_media_type",
            status=415,
        )


def _is_public(asked: bool | None, tenant: Tenant) -> bool:
    """True if a new schema is public, False if only its tenant can see it."""
    if tenant.salt is None:
        if asked is False:
            raise BodyError("this server has no keys, so all on it is public; leave public out", param="public")
        return True
    if asked and not tenant.admin:
        message = "only an admin may make a schema public; leave public out, and it is yours alone"
        raise BodyError(message, param="public", code="admin_only", status=403)
    return bool(asked)


def _policy(body: SchemaOptions, tenant: Tenant, service: Service) -> str | None:
    """Return the policy to encode modules for; None if modules are not allowed and the request does not ask for them.

    Raises:
        BodyError: the request asks for a policy that is not allowed or not modular.
        ParameterError: the policy is invalid.
    """
    allowed = ReusePolicy.least(service.settings.max_reuse, tenant.limits.max_reuse)
    given = PolicyFields(body.reuse, tolerance=body.tolerance).policy(deprecated=log_deprecated)
    default = service.settings.policy or (AUTO if service.llm.auto.rows() else None)
    policy = ReusePolicy.ahead(default, allowed) if given is None else given
    if not policy.modular:
        message = f"reuse={body.reuse!r:.60} reads no modules. Write reuse={' or reuse='.join(map(repr, CONTEXTS))}."
        raise BodyError(message, param="reuse", code="policy.not_for_schemas")
    if given is not None and not given.plain:
        plain = f"reuse={str(given).partition('+')[0]!r}"
        message = (
            f"reuse={body.reuse!r:.60} has fields that a schema does not take. Write {plain}, and give recompute, "
            "promote and across_adapters with each request."
        )
        raise BodyError(message, param="reuse", code="policy.not_for_schemas")
    if not policy.within(allowed):
        wanted = body.model_fields_set & {"reuse", "tolerance", "positions"} or (
            "encode" in body.model_fields_set and body.encode
        )
        if wanted:
            message = f"you may ask for at most reuse '{allowed}', so nothing is encoded ahead; leave reuse, "
            raise BodyError(f"{message}positions and encode out", param="reuse", code="reuse_not_allowed", status=403)
        return None
    service.llm.positions_for(str(policy), body.positions)
    return str(policy.without_recompute())


def _to_encode(given: GivenSchema, reuse: str | None, tenant: Tenant) -> int:
    """Estimate the tokens that encoding a schema costs its tenant. The exact number is known after layout."""
    if given.options.encode is False or reuse is None or tenant.limits.tokens_per_minute is None:
        return 0
    return given.tokens()


async def _missing(registry: SchemaCatalog, record: SchemaRecord) -> int:
    """Return the number of tokens that are not encoded yet."""
    return sum(of - tokens for of, tokens in (await registry.stored(record)).values())


async def _encode(
    registry: SchemaCatalog, record: SchemaRecord, options: SchemaOptions, tenant: Tenant, admission: AdmittedRequest
) -> None:
    if options.encode is False or record.reuse is None:
        return
    admission.tokens(await _missing(registry, record))
    task = await registry.prewarm(record, tenant.name)
    if options.encode is True:
        await task.result()


async def _response(
    service: Service,
    record: SchemaRecord,
    tenant: Tenant,
    dialect: Dialect,
    *,
    status: int = 200,
    source: bool = False,
    page: Page | None = None,
) -> Response:
    """Return a response that shows a schema to a tenant, with one page of its modules."""
    page, registry = page or Page(), service.schemas
    page.check(record)
    stored, task = await registry.stored(record), registry.prewarm_of(record)

    def body() -> dict[str, Any]:
        shown = detail(record, stored, encoding(task, dialect), registry.bytes_per_token, page)
        shown["pinned"] = registry.is_pinned(record, tenant)
        return shown | ({"source": {record.source.form: record.source.document()}} if source else {})

    headers = {"ETag": record.etag}
    if status == 201:
        headers["Location"] = f"{router.prefix}/{quote(record.name)}"
    # The tree is built from all modules, even if the page shows few.
    size = len(record.layout.schema.modules) * _MODULE_BYTES + (record.source.size if source else 0)
    return await json_response(body, size, status, headers)


async def _outcome(registry: SchemaCatalog, task: PrewarmTask, dialect: Dialect) -> dict[str, Any]:
    """Return the result of an encoding."""
    record = task.record
    counts = (await registry.stored(record)).values()
    return {
        "object": "schema.encoding",
        "name": record.name,
        "version": record.version,
        **encoding(task, dialect),
        "encoded": sum(tokens for _, tokens in counts),
        "of": sum(of for of, _ in counts),
    }


async def progress_events(registry: SchemaCatalog, task: PrewarmTask, dialect: Dialect) -> AsyncIterator[bytes]:
    """Yield server-sent events: the progress, the result, and the end marker."""
    async for done, total in task.watch():
        yield _event({"done": done, "total": total})
    outcome = await _outcome(registry, task, dialect) if task.failure is None else dialect.error_body(task.failure)
    yield _event(outcome)
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _refused(error: PMLError, field: str, scope: Scope) -> Response:
    """Return the response that lists all errors of a schema. ``field`` is the body's field that holds the schema."""
    failure = dataclasses.replace(failure_of(error), param=field, code="invalid_schema", problems=tuple(error.problems))
    return failure_response(failure, scope)


_MOST = 200  # findings in an answer


@router.get("/{name}/advice", tags=["schemas"], **ADVICE)
async def advice(request: Request, name: str, public: Public = None) -> Response:
    """Advice on memory, positions and reuse for the current version of a schema."""
    service, tenant = asking(request, only=("public",))
    llm = service.llm
    async with service.meter.request(tenant, tokens=False):
        record = service.schemas.find(name, tenant, public=public)
        longest = llm.client.model.max_positions

        def findings() -> list[Finding]:
            return lint_schema(record.layout, llm.processor.encoder, max_positions=longest)

        found = await llm.pools.schemas.run(findings, owner=tenant.salt)
    data = [_told(finding) for finding in islice(found, _MOST)]
    return JSONBytes(
        {
            "object": "list",
            "schema": record.name,
            "version": record.version,
            "data": data,
            "has_more": len(found) > _MOST,
        }
    )


def _told(finding: Finding) -> dict[str, Any]:
    place = finding.place
    where = {"path": place.path} if isinstance(place, JSONPlace) else {"line": place.line, "column": place.column}
    return {"rule": finding.rule, **where, "message": finding.message}
