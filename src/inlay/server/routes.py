"""The table of paths, with the flags that middlewares read, and the OpenAPI document.

HEAD is answered on every path that takes GET. Routes read bodies themselves, so FastAPI cannot describe them. This
module describes the bodies of most routes. The dialects describe the bodies of the routes that answer requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from re import Pattern
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.datastructures import MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inlay.api.anthropic import Endpoint as Anthropic
from inlay.api.call import AnswerRoute
from inlay.api.dialect import ANTHROPIC, DIALECTS, OPENAI, RESPONSES, Dialect
from inlay.api.responses.bodies import ANSWER as RESPONSE
from inlay.policy import FIELDS as POLICY_FIELDS


@dataclass(frozen=True, slots=True)
class Route:
    """A path and its flags.

    Args:
        path: with names in braces, as routers write them.
        methods: the HTTP methods that it accepts.
        needs_key: on a server with keys, only a tenant is answered. Probes have no key.
        uses_tokens: a request with a body may use tokens, so it is refused if the tenant's tokens are used up.
        always_open: answered while the server stops, and not waited for when it drains. For status routes.
        takes_xml: the body may be PML, as text.
        takes_file: the route reads a body of any size itself.
        probe: answered without a Host header, because load balancers may use HTTP/1.0, which has none. Web pages always
            send a Host, and these paths reveal nothing to them.
        dialect: the format of its requests, answers and failures.
    """

    path: str
    methods: tuple[str, ...]
    needs_key: bool = True
    uses_tokens: bool = True
    always_open: bool = False
    takes_xml: bool = False
    takes_file: bool = False
    probe: bool = False
    dialect: Dialect = OPENAI


ROUTES = (
    *(Route(answers.path, ("POST",), dialect=dialect) for dialect in DIALECTS for answers in dialect.routes),
    Route("/v1/responses/{name}", ("GET", "DELETE"), dialect=RESPONSES),
    Route("/v1/responses/{name}/cancel", ("POST",), uses_tokens=False, dialect=RESPONSES),
    Route("/v1/responses/{name}/input_items", ("GET",), dialect=RESPONSES),
    Route(Anthropic.COUNT, ("POST",), uses_tokens=False, dialect=ANTHROPIC),
    Route("/tokenize", ("POST",), uses_tokens=False),
    Route("/detokenize", ("POST",), uses_tokens=False),
    Route("/v1/models", ("GET",)),
    Route("/v1/models/{name:path}", ("GET",)),
    Route("/v1/schemas", ("GET", "POST"), takes_xml=True),
    Route("/v1/schemas/{name}", ("GET", "PUT", "DELETE"), takes_xml=True),
    Route("/v1/schemas/{name}/warm", ("POST",), takes_xml=True),
    Route("/v1/schemas/{name}/pin", ("PUT", "DELETE")),
    Route("/v1/schemas/{name}/stored", ("DELETE",)),
    Route("/v1/schemas/{name}/versions/{version}", ("GET",)),
    Route("/v1/schemas/{name}/advice", ("GET",)),
    Route("/v1/cache", ("GET",)),
    Route("/v1/cache/score", ("POST",), uses_tokens=False),
    Route("/v1/cache/segments", ("GET", "DELETE")),
    Route("/v1/cache/segments/{key}", ("GET", "DELETE")),
    Route("/v1/cache/segments/{key}/pin", ("PUT", "DELETE")),
    Route("/v1/cache/segments/{key}/file", ("GET",)),
    Route("/v1/cache/verify", ("POST",), uses_tokens=False),
    Route("/v1/cache/files", ("POST",), uses_tokens=False, takes_file=True),
    Route("/v1/divergence", ("GET", "DELETE")),
    Route("/v1/drift", ("GET", "DELETE")),
    Route("/v1/requests", ("GET",)),
    Route("/", ("GET",), needs_key=False, always_open=True),
    Route("/page/{name}", ("GET",), needs_key=False, always_open=True),
    Route("/health", ("GET",), needs_key=False, always_open=True, probe=True),
    Route("/ready", ("GET",), needs_key=False, always_open=True, probe=True),
    Route("/version", ("GET",), needs_key=False, always_open=True),
    Route("/metrics", ("GET",), always_open=True),
    Route("/openapi.json", ("GET",)),
)

_EXACT = {route.path: route for route in ROUTES if "{" not in route.path}
_PATTERNS: list[tuple[Pattern[str], Route]] = [
    (compile_path(route.path)[0], route) for route in ROUTES if "{" in route.path
]
_NOWHERE = Route("", ())  # an unknown path has no privileges


def route_of(path: str) -> Route:
    """Return the row for a request's path."""
    if path in _EXACT:
        return _EXACT[path]
    return next((route for pattern, route in _PATTERNS if pattern.match(path)), _NOWHERE)


class RootPathMiddleware:
    """ASGI middleware, outermost: removes the server's root path from request paths, if the proxy left it there.

    It adds the root path to the Location header of responses.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "location" in headers:
                    headers["location"] = self._root + headers["location"]
            await send(message)

        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"][len(self._root) :]
        await self._app(scope, receive, sending)


class HeadMiddleware:
    """ASGI middleware: answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, sending)
        finally:
            if "route" in asked:  # the log needs the route
                scope["route"] = asked["route"]


_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _COUNT}

#: HTTP status → its description.
_WRONG = {
    400: "The request is wrong; the message says what to write instead.",
    401: "The key is missing, wrong or revoked.",
    403: "More than the key or the server allows.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    411: "A body needs a length.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests, for the key or for the server; Retry-After says when to try again.",
    503: "The server is starting or stopping, and Retry-After says when to try again; or a fault has ended its engine.",
    504: "The request was not answered by its deadline.",
    507: "The device has no memory left for it.",
}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of an object that requires these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_MODEL = _object(
    id=_TEXT,
    object=_TEXT,
    created=_COUNT,
    owned_by=_TEXT,
    max_model_len=_COUNT,
    default_sampling_params={"type": "object"},
)
_SCHEMAS: dict[str, Any] = {
    "Tokenize": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: {"$ref": _REF.format(model=f"ChatBody/properties/{name}")} for name in ("messages", "tools")},
            **{
                name: {"$ref": _REF.format(model=f"CompletionBody/properties/{name}")}
                for name in ("model", "pml", "positions", "prompt", "reuse", *POLICY_FIELDS)
            },
            "add_special_tokens": {"type": "boolean", "default": True},
            "return_token_strs": {"type": "boolean", "default": False},
        },
    },
    "Detokenize": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"model": _TEXT, "tokens": {**_IDS, "minItems": 1}},
        "required": ["tokens"],
    },
}


def _route(
    ok: Mapping[str, Any],
    *,
    body: str | None = None,
    error: str = "Error",
    stream: bool = False,
    wrong: tuple[int, ...],
) -> dict[str, Any]:
    """Return FastAPI's arguments for a route: its answer, its body and error schemas, and its error statuses."""
    content: dict[str, Any] = {"application/json": {"schema": ok}}
    if stream:
        content["text/event-stream"] = {"schema": _TEXT}
    told = {"application/json": {"schema": {"$ref": _REF.format(model=error)}}}
    responses = {status: {"description": _WRONG[status], "content": told} for status in wrong}
    found: dict[str, Any] = {"responses": {200: {"description": "All went well.", "content": content}, **responses}}
    if body is not None:
        schema = {"$ref": _REF.format(model=body)}
        found["openapi_extra"] = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
    return found


_BODY = (400, 401, 403, 404, 408, 411, 413, 415, 429, 503)
TOKENIZE = _route(_object(count=_COUNT, max_model_len=_COUNT, tokens=_IDS), body="Tokenize", wrong=_BODY)
COUNT_TOKENS = _route(_object(input_tokens=_COUNT), body="AnthropicCountBody", error="AnthropicError", wrong=_BODY)
STORED_RESPONSE = _route(RESPONSE, wrong=(400, 401, 404, 429, 503))
DELETED_RESPONSE = _route(_object(id=_TEXT, object=_TEXT, deleted={"const": True}), wrong=(400, 401, 404, 429, 503))
_PERHAPS_TEXT = {"type": ["string", "null"]}
INPUT_ITEMS = _route(
    _object(
        object={"const": "list"},
        data={"type": "array"},
        first_id=_PERHAPS_TEXT,
        last_id=_PERHAPS_TEXT,
        has_more={"type": "boolean"},
    ),
    wrong=(400, 401, 404, 429, 503),
)
DETOKENIZE = _route(_object(prompt=_TEXT), body="Detokenize", wrong=_BODY)
MODELS = _route(_object(object=_TEXT, data={"type": "array", "items": _MODEL}), wrong=(401, 503))
MODEL = _route(_MODEL, wrong=(401, 404, 503))
_SHARE = {"type": "number", "minimum": 0}
_PERHAPS = {"type": ["number", "null"]}
_DRIFT = _object(
    schema=_TEXT,
    reuse=_TEXT,
    positions=_TEXT,
    samples=_COUNT,
    **dict.fromkeys(("kl", "low", "top1"), _SHARE),
    high=_PERHAPS,
    taken={"type": ["string", "null"]},
)
DIVERGENCE = _route(
    _object(object=_TEXT, shadow=_SHARE, threshold=_PERHAPS, data={"type": "array", "items": _DRIFT}),
    wrong=(400, 401, 429, 503),
)
_ROWS = _object(
    object={"const": "list"}, data={"type": "array", "items": {"type": "object"}}, has_more={"type": "boolean"}
)
LIVE_REQUESTS = _route(_ROWS, wrong=(400, 401, 429, 503))
ADVICE = _route(_ROWS, wrong=(400, 401, 404, 429, 503))
LIFTED = _route(_object(object=_TEXT, schema={"type": ["string", "null"]}, lifted=_COUNT), wrong=(400, 401, 429, 503))
HEALTH = _route(_object(status=_TEXT), wrong=(503,))
READY = _route(_object(status=_TEXT), wrong=(503,))
VERSION = _route(_object(version=_TEXT), wrong=())


def of_answers(route: AnswerRoute) -> dict[str, Any]:
    """Return FastAPI's arguments for a route that answers requests."""
    described = _route(route.answer, body=route.body, error=route.error, stream=True, wrong=(*_BODY, 504, 507))
    return {"name": route.name, "description": route.summary, **described}


def describe(app: FastAPI, names: Sequence[str], root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI document of an app. It is built once.

    Args:
        app: the application.
        names: the names of its model.
        root_path: the prefix of its paths.
    """
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        if root_path:
            document["servers"] = [{"url": root_path}]
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for dialect in DIALECTS:
            schemas.update(dialect.components(names))
        schemas.update(_SCHEMAS)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI adds it; this server answers 400 instead
        app.openapi_schema = document
    return app.openapi_schema
