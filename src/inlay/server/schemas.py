"""``/v1/schemas``: schemas made, listed, changed, deleted, and encoded ahead of time. See docs/schemas-api.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from inlay.api.failures import BodyError, failure_of
from inlay.errors import PMLError, Problem
from inlay.pml.problems import JSONPlace
from inlay.policy import BEST, CONTEXTS, ReusePolicy
from inlay.server.costs import text_tokens
from inlay.server.errors import JSONBytes, failure_response, json_bytes
from inlay.server.offload import json_response
from inlay.server.prewarm import Warming
from inlay.server.schema_documents import SchemaBody, SchemaOptions, Source, read_body
from inlay.server.schema_registry import Entry, SchemaShelf
from inlay.server.schema_view import MODULES, Page, detail, encoding, summary
from inlay.server.tenants import Tenant

if TYPE_CHECKING:
    from inlay.server.limits import Pass
    from inlay.server.service import Service

__all__ = ["SchemaShelf", "router"]

router = APIRouter(prefix="/v1/schemas")

Limit = Annotated[int, Query(ge=1, le=100, description="how many to list")]
Modules = Annotated[int, Query(ge=1, le=MODULES, description="how many modules to show")]
After = Annotated[str, Query(description="the module behind which to begin")]
Public = Annotated[bool | None, Query(description="true for the public schema of that name, false for your own")]

_BODY = {
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
_NOTHING = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"enum": [{}]}}}}}
_MODULE_BYTES = 200  # of a module in a response, about
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
    507: "There is no memory for what is to be encoded.",
}
_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"description": says} for status, says in _WRONG.items()}


@router.post("", status_code=201, openapi_extra=_BODY, responses=_RESPONSES)
async def create(request: Request) -> Response:
    service, tenant = _asking(request)
    body = read_body(request.state.body, request.query_params)
    salt = None if _is_public(body.public, tenant) else tenant.salt
    reuse = _policy(body, tenant, service)
    async with service.meter.request(tenant) as bill:
        bill.hold(tokens=_to_encode(body, reuse, tenant))
        try:
            source = await service.schemas.read(body, tenant)
            entry = await service.schemas.create(source, salt=salt, reuse=reuse, positions=body.positions)
        except PMLError as error:
            return _refused(error, body)
        await _encode(service.schemas, entry, body, tenant, bill)
        return await _shown(service.schemas, entry, status=201)


@router.get("", responses=_RESPONSES)
async def all_schemas(request: Request, limit: Limit = 20, after: str = "") -> Response:
    service, tenant = _asking(request, only=("limit", "after"))
    async with service.meter.request(tenant, tokens=False):
        left = [entry for entry in service.schemas.visible(tenant) if entry.name > after]
        data = [summary(entry) for entry in left[:limit]]
    names = [entry["name"] for entry in data] or [None]
    return JSONBytes(
        {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": len(left) > limit}
    )


@router.get("/{name}", responses=_RESPONSES)
async def one_schema(
    request: Request,
    name: str,
    public: Public = None,
    source: bool = False,
    limit: Modules = MODULES,
    after: After = "",
) -> Response:
    service, tenant = _asking(request, only=("public", "source", "limit", "after"))
    async with service.meter.request(tenant, tokens=False):
        entry = service.schemas.find(name, tenant, public=public)
        return await _shown(service.schemas, entry, source=source, page=Page(after, limit))


@router.put("/{name}", openapi_extra=_BODY, responses=_RESPONSES)
async def replace(request: Request, name: str) -> Response:
    service, tenant = _asking(request)
    body = read_body(request.state.body, request.query_params)
    before = service.schemas.own(name, tenant, public=body.public)
    reuse = _policy(body, tenant, service)
    async with service.meter.request(tenant) as bill:
        bill.hold(tokens=_to_encode(body, reuse, tenant))
        try:
            source = await service.schemas.read(body, tenant)
            _check_name(source, name)
            entry = await service.schemas.replace(
                before, source, reuse=reuse, positions=body.positions, if_match=request.headers.get("if-match")
            )
        except PMLError as error:
            return _refused(error, body)
        await _encode(service.schemas, entry, body, tenant, bill)
        return await _shown(service.schemas, entry)


@router.delete("/{name}", responses=_RESPONSES)
async def delete(request: Request, name: str, public: Public = None) -> Response:
    service, tenant = _asking(request, only=("public",))
    entry = service.schemas.own(name, tenant, public=public)
    await service.schemas.remove(entry, if_match=request.headers.get("if-match"))
    return JSONBytes({"object": "schema.deleted", "name": name, "public": entry.public, "deleted": True})


@router.post("/{name}/warm", openapi_extra=_NOTHING, responses=_RESPONSES)
async def warm(request: Request, name: str, public: Public = None, stream: bool = False) -> Response:
    _check_meant(request)
    service, tenant = _asking(request, only=("public", "stream"), body=({}, None))
    entry = service.schemas.find(name, tenant, public=public)
    async with service.meter.request(tenant) as bill:
        missing = await _missing(service.schemas, entry)
        bill.hold(tokens=missing)  # others of the tenant's may have used up its tokens meanwhile
        bill.tokens(missing)
        warming = await service.schemas.warm(entry, tenant.name)
    if stream or "text/event-stream" in request.headers.get("accept", ""):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(service.schemas, warming), media_type="text/event-stream", headers=headers)
    await warming.result()
    if warming.failure is not None:
        return failure_response(warming.failure)
    return JSONBytes(await _warmth(service.schemas, warming))


def _asking(
    request: Request, only: tuple[str, ...] | None = None, body: tuple[Any, ...] = (None,)
) -> tuple[Service, Tenant]:
    """What the routes share, and who asks. only: what may stand in the query where the body is one of a few."""
    if only is not None:
        for name in request.query_params:
            if name not in only:
                raise BodyError(f"the query holds {name!r:.60}; it may hold {', '.join(only)}", param="query")
        if request.state.body not in body:
            takes = "no body; leave it out" if len(body) == 1 else "an empty object as its body; send {}"
            raise BodyError(f"this takes {takes}", code="unexpected_body")
    return request.app.state.service, request.state.tenant


def _check_meant(request: Request) -> None:
    """Raises BodyError for a request that a web page could have its visitor's browser send without asking first.

    Without a body there is no type of it that Guard would look at. Either header makes a browser ask.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and "authorization" not in request.headers:
        raise BodyError(
            "there is no Content-Type, so that a web page could have sent this; send {} with "
            "'Content-Type: application/json'",
            code="unsupported_media_type",
            status=415,
        )


def _is_public(asked: bool | None, tenant: Tenant) -> bool:
    """Whose a new schema is: everybody's or the tenant's alone."""
    if tenant.salt is None:
        if asked is False:
            raise BodyError("this server has no keys, so all on it is public; leave public out", param="public")
        return True
    if asked and not tenant.admin:
        message = "only an admin may make a schema public; leave public out, and it is yours alone"
        raise BodyError(message, param="public", code="admin_only", status=403)
    return bool(asked)


def _policy(body: SchemaOptions, tenant: Tenant, service: Service) -> str | None:
    """What modules are encoded for; None where nobody asks for it and it is not allowed. Raises ParameterError."""
    allowed = ReusePolicy.least(service.settings.max_reuse, tenant.limits.max_reuse)
    policy = BEST if body.reuse is None else ReusePolicy.named(body.reuse)
    if policy is None or not policy.modular:
        message = f"reuse is {body.reuse!r:.60}; modules are encoded ahead for {' or '.join(map(repr, CONTEXTS))}"
        raise BodyError(message, param="reuse")
    if not policy.within(allowed):
        wanted = body.model_fields_set & {"reuse", "positions"} or ("encode" in body.model_fields_set and body.encode)
        if wanted:
            message = f"the most that you may ask for is reuse '{allowed}', so nothing is encoded ahead; leave reuse, "
            raise BodyError(f"{message}positions and encode out", param="reuse", code="reuse_not_allowed", status=403)
        return None
    service.llm.positions_for(str(policy), body.positions)
    return str(policy)


def _check_name(source: Source, name: str) -> None:
    given = source.schema.name
    if given != name:
        message = f"the schema is named {given!r:.100} and the path says {name!r:.100}; write the same name in both"
        raise BodyError(message, param="name", code="invalid_name")


def _to_encode(body: SchemaBody, reuse: str | None, tenant: Tenant) -> int:
    """About how many tokens a schema will take of a tenant's; how many they are is known when it is laid out."""
    if body.encode is False or reuse is None or tenant.limits.tokens_per_minute is None:
        return 0
    return text_tokens(body.pml) if body.pml is not None else sum(map(text_tokens, _texts(body.schema_)))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON but the names of keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(member)


async def _missing(shelf: SchemaShelf, entry: Entry) -> int:
    """How many tokens there are to be encoded."""
    return sum(of - tokens for of, tokens in (await shelf.stored(entry)).values())


async def _encode(shelf: SchemaShelf, entry: Entry, body: SchemaOptions, tenant: Tenant, bill: Pass) -> None:
    if body.encode is False or entry.reuse is None:
        return
    bill.tokens(await _missing(shelf, entry))
    warming = await shelf.warm(entry, tenant.name)
    if body.encode is True:
        await warming.result()


async def _shown(
    shelf: SchemaShelf, entry: Entry, *, status: int = 200, source: bool = False, page: Page | None = None
) -> Response:
    """A schema as it is now, one page of its modules."""
    page = page or Page()
    page.check(entry)
    stored, warming = await shelf.stored(entry), shelf.warming(entry)

    def body() -> dict[str, Any]:
        shown = detail(entry, stored, warming, shelf.bytes_per_token, page)
        return shown | ({"source": {entry.source.form: entry.source.document()}} if source else {})

    headers = {"ETag": entry.etag}
    if status == 201:
        headers["Location"] = f"{router.prefix}/{quote(entry.name)}"
    # The tree is built of all modules, however few are shown.
    size = len(entry.layout.schema.modules) * _MODULE_BYTES + (entry.source.size if source else 0)
    return await json_response(body, size, status, headers)


async def _warmth(shelf: SchemaShelf, warming: Warming) -> dict[str, Any]:
    """What came of an encoding."""
    entry = warming.entry
    counts = (await shelf.stored(entry)).values()
    return {
        "object": "schema.encoding",
        "name": entry.name,
        "version": entry.version,
        **encoding(warming),
        "encoded": sum(tokens for _, tokens in counts),
        "of": sum(of for of, _ in counts),
    }


async def _events(shelf: SchemaShelf, warming: Warming) -> AsyncIterator[bytes]:
    """Server-sent events: how far it is, what came of it, and the end."""
    async for done, total in warming.watch():
        yield _event({"done": done, "total": total})
    yield _event(await _warmth(shelf, warming) if warming.failure is None else warming.failure.body())
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _refused(error: PMLError, body: SchemaBody) -> Response:
    """All that is wrong with a schema."""
    said = failure_of(error).body()["error"]
    said |= {"param": "pml" if body.pml is not None else "schema", "code": "invalid_schema"}
    return JSONBytes({"error": {**said, "problems": [_described(problem) for problem in error.problems]}}, 400)


def _described(problem: Problem) -> dict[str, Any]:
    place = problem.place
    path = {"path": place.path} if isinstance(place, JSONPlace) else {}
    return {"line": place.line, "column": place.column, **path, "message": problem.message}
