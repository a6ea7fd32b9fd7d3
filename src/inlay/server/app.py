"""The FastAPI application around one service, with the health probes and the lists of models and requests.

``/v1/divergence`` gives the divergence of a tenant's answers from full prefill, and their fallback policies.
``/v1/drift`` is its deprecated name. See docs/guides/reuse-policies.md, "Shadow sampling".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import inlay
from inlay.api.failures import BodyError
from inlay.client.async_llm import AsyncLLM
from inlay.errors import InlayError
from inlay.models.embedding import EmbeddingModel
from inlay.models.location import public_name
from inlay.pml import Schema
from inlay.server import (
    cache,
    completions,
    metrics,
    page_files,
    schemas,
    stored_responses,
    tokens,
)
from inlay.server.body import BodyMiddleware
from inlay.server.completions import check_name
from inlay.server.errors import (
    JSONBytes,
    handle_http_exception,
    handle_inlay_error,
    handle_refused_write,
    handle_validation_error,
)
from inlay.server.logs import RequestLogMiddleware
from inlay.server.routes import (
    DIVERGENCE,
    HEALTH,
    LIFTED,
    LIVE_REQUESTS,
    MODEL,
    MODELS,
    READY,
    VERSION,
    HeadMiddleware,
    RootPathMiddleware,
    describe,
)
from inlay.server.schema_record import SchemaKeeper
from inlay.server.schemas import asking
from inlay.server.service import DrainMiddleware, Service, stopping_error
from inlay.server.settings import ServerSettings
from inlay.server.tenants import AuthMiddleware, LocalHostMiddleware, RateLimitMiddleware
from inlay.types import DivergenceStats

_TOLD_TO_PAGES = (
    "ETag",
    "Location",
    "Retry-After",
    "X-Inlay-Ignored-Fields",
    "X-Request-Id",
    "X-Should-Retry",
    "Request-Id",
    *(
        f"Anthropic-RateLimit-{name}-{what}"
        for name in ("Requests", "Tokens")
        for what in ("Limit", "Remaining", "Reset")
    ),
    *(f"X-RateLimit-{what}-{name}" for name in ("Requests", "Tokens") for what in ("Limit", "Remaining", "Reset")),
)
_RETRY_S = 1.0

Limit = Annotated[int, Query(ge=1, le=1000, description="how many to list")]

#: Routes for the health probes, the version, and the lists of models and requests.
router = APIRouter()


def build_app(
    llm: AsyncLLM,
    settings: ServerSettings,
    first_schemas: Sequence[Schema] = (),
    keeper: SchemaKeeper | None = None,
) -> FastAPI:
    """Return the server as an ASGI application. Its routes share ``app.state.service``.

    Args:
        llm: the model that answers requests.
        settings: the server's options.
        first_schemas: public schemas that exist from the start.
        keeper: stores schemas across restarts; None to keep them in memory only.

    Raises:
        ParameterError: the keys file is invalid.
    """
    service = Service(llm, settings, first_schemas, keeper)
    app = FastAPI(
        title="inlay",
        summary="OpenAI's API, with modules whose attention states are computed once.",
        version=inlay.__version__,
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts
        redoc_url=None,
        lifespan=_lifespan,
        middleware=_middlewares(service),
        exception_handlers={
            InlayError: handle_inlay_error,
            OSError: handle_refused_write,
            HTTPException: handle_http_exception,
            RequestValidationError: handle_validation_error,
        },
    )
    app.state.service = service
    parts = [
        completions.router,
        stored_responses.router,
        tokens.router,
        schemas.router,
        cache.router,
        router,
        metrics.router,
        *([page_files.router] if settings.page else []),
    ]
    for part in parts:
        app.include_router(part)
    app.state.routes = [route for part in parts for route in part.routes]
    app.openapi = partial(describe, app, service.names, settings.root_path)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    await service.open()
    yield


def _middlewares(service: Service) -> list[Middleware]:
    """Outermost first. Authentication and rate limits come before the body is read."""
    settings = service.settings
    pages = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
        allow_headers=["*"],
        expose_headers=_TOLD_TO_PAGES,
    )
    # web pages cannot open a Unix domain socket
    anybody = settings.has_keys or settings.open_to_network or settings.uds is not None
    return [
        *([Middleware(RootPathMiddleware, root_path=settings.root_path)] if settings.root_path else []),
        Middleware(RequestLogMiddleware, counts=service.metrics),
        *([] if anybody else [Middleware(LocalHostMiddleware)]),
        *([pages] if settings.cors_origins else []),
        Middleware(DrainMiddleware, in_flight=service.in_flight),
        Middleware(AuthMiddleware, tenants=service.tenants),
        Middleware(RateLimitMiddleware, meter=service.meter),
        Middleware(
            BodyMiddleware,
            max_body_bytes=settings.body_bytes,
            max_nesting=settings.max_nesting,
            workers=service.body_workers,
        ),
        Middleware(HeadMiddleware),
    ]


@router.get("/health", tags=["server"], **HEALTH)
async def health(request: Request) -> Response:
    """The process and its engine are alive."""
    service: Service = request.app.state.service
    await service.llm.check_health()
    return JSONBytes({"status": "alive"})


@router.get("/ready", tags=["server"], **READY)
async def ready(request: Request) -> Response:
    """The server accepts requests: the model is loaded, first schemas are encoded, and the server is not stopping."""
    service: Service = request.app.state.service
    if service.in_flight.stopping:
        raise stopping_error()
    await service.llm.check_health()
    if not service.ready:
        message = "the server is starting; try again in a moment"
        raise BodyError(message, code="not_ready", status=503, retry_after_s=_RETRY_S)
    service.check_moving()
    return JSONBytes({"status": "ready"})


@router.get("/version", tags=["server"], **VERSION)
async def version() -> Response:
    """The version of inlay."""
    return JSONBytes({"version": inlay.__version__})


@router.get("/v1/models", tags=["models"], **MODELS)
async def models(request: Request) -> Response:
    """All names of the model, its adapters, and the embedding model."""
    service: Service = request.app.state.service
    own = [] if service.embedding is None else [_embedding_model(service, service.embedding.model)]
    return JSONBytes({"object": "list", "data": [*(_model(service, name) for name in service.names), *own]})


@router.get("/v1/models/{name:path}", tags=["models"], **MODEL)
async def model(request: Request, name: str) -> Response:
    """One model or adapter, by name."""
    service: Service = request.app.state.service
    if service.embedding is not None and name == service.embedding.model.name:
        return JSONBytes(_embedding_model(service, service.embedding.model))
    check_name(name, service)
    return JSONBytes(_model(service, name))


@router.get("/v1/requests", tags=["server"], **LIVE_REQUESTS)
async def requests(request: Request, limit: Limit = 100) -> Response:
    """The tenant's running and latest requests for answers, with counts and times. An admin sees all tenants."""
    service, tenant = schemas.asking(request, only=("limit",))
    service.meter.count(tenant)
    found = list(islice(service.live.rows(tenant), limit + 1))
    return JSONBytes({"object": "list", "data": found[:limit], "has_more": len(found) > limit})


def _model(service: Service, name: str) -> dict[str, Any]:
    """Return OpenAI's model object with vLLM's ``root``, ``parent`` and ``max_model_len``, and the sampling defaults.

    The parent of an adapter is its model.
    """
    adapter = service.llm.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "inlay",
        "root": public_name(service.llm.model_name if adapter is None else adapter.folder),
        "parent": None if adapter is None else service.settings.served_names[0],
        "max_model_len": service.llm.client.model.max_positions,
        "default_sampling_params": service.llm.sampling_defaults,
    }


def _embedding_model(service: Service, model: EmbeddingModel) -> dict[str, Any]:
    """Return the model object of the embedding model. See ``_model``."""
    return {
        "id": model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "inlay",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_tokens,
        "default_sampling_params": {},
    }


Name = Annotated[str | None, Query(description="of this schema alone")]

_DIGITS = 6  # of numbers in a response


@router.get("/v1/drift", tags=["server"], deprecated=True, **DIVERGENCE)
@router.get("/v1/divergence", tags=["server"], **DIVERGENCE)
async def divergence(request: Request) -> Response:
    """The divergence of the tenant's own answers, by schema and policy."""
    service, tenant = asking(request, only=())
    async with service.meter.request(tenant, tokens=False):
        config, found = service.llm.config, service.llm.divergence(cache_salt=tenant.salt)
        data = [_told(one) for one in found]
        return JSONBytes(
            {"object": "list", "shadow": config.shadow, "threshold": config.shadow_threshold, "data": data}
        )


@router.delete("/v1/drift", tags=["server"], deprecated=True, **LIFTED)
@router.delete("/v1/divergence", tags=["server"], **LIFTED)
async def lift(request: Request, schema: Name = None) -> Response:
    """Delete the samples, and lift the fallbacks of the tenant's requests."""
    service, tenant = asking(request, only=("schema",))
    async with service.meter.request(tenant, tokens=False):
        lifted = service.llm.lift_fallback(schema, cache_salt=tenant.salt)
        kind = request.url.path.rpartition("/")[2]
        return JSONBytes({"object": f"{kind}.deleted", "schema": schema, "lifted": lifted})


def _told(one: DivergenceStats) -> dict[str, Any]:
    figures = {name: None if value is None else round(value, _DIGITS) for name, value in _figures(one).items()}
    return {**asdict(one), **figures}


def _figures(one: DivergenceStats) -> dict[str, float | None]:
    return {"kl": one.kl, "low": one.low, "high": one.high, "top1": one.top1}
