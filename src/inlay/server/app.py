"""The application: middlewares, routes and handlers of errors around one service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import inlay
from inlay.async_llm import AsyncLLM
from inlay.errors import InlayError
from inlay.pml import Schema
from inlay.server import completions, health, metrics, models, schemas, tokens
from inlay.server.documents import describe
from inlay.server.errors import not_found, not_valid, said_wrong
from inlay.server.gate import Gate
from inlay.server.guard import Guard
from inlay.server.heads import HeadAsGet
from inlay.server.hosts import LocalHosts
from inlay.server.limits import RateHeaders
from inlay.server.logs import RequestLog
from inlay.server.service import Service
from inlay.server.settings import ServerSettings
from inlay.server.tenants import Authenticate

_TOLD_TO_PAGES = (
    "ETag",
    "Location",
    "Retry-After",
    "X-Request-Id",
    "X-Should-Retry",
    *(f"X-RateLimit-{what}-{name}" for name in ("Requests", "Tokens") for what in ("Limit", "Remaining", "Reset")),
)


def build_app(llm: AsyncLLM, settings: ServerSettings, first_schemas: Sequence[Schema] = ()) -> FastAPI:
    """The server as an ASGI application; ``app.state.service`` is what its routes share.

    first_schemas: public ones that are there from the start. Raises ParameterError for a file of keys that is wrong.
    """
    service = Service(llm, settings, first_schemas)
    app = FastAPI(
        title="inlay",
        summary="OpenAI's API, with modules whose attention states are computed once.",
        version=inlay.__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan,
        middleware=_middlewares(service),
        exception_handlers={
            InlayError: said_wrong,
            HTTPException: not_found,
            RequestValidationError: not_valid,
        },
    )
    app.state.service = service
    for part in (completions, tokens, models, schemas, health, metrics):
        app.include_router(part.router)
    app.openapi = partial(describe, app, settings.served_names)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    await service.open()
    yield


def _middlewares(service: Service) -> list[Middleware]:
    """Outermost first: who asks is settled before anything of the body is read."""
    settings = service.settings
    pages = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
        allow_headers=["*"],
        expose_headers=_TOLD_TO_PAGES,
    )
    return [
        Middleware(RequestLog, counts=service.metrics),
        *([Middleware(LocalHosts)] if settings.keys_file is None and not settings.open_to_network else []),
        *([pages] if settings.cors_origins else []),
        Middleware(Gate, flights=service.flights),
        Middleware(Authenticate, tenants=service.tenants),
        Middleware(RateHeaders, meter=service.meter),
        Middleware(
            Guard,
            max_body_bytes=settings.max_body_bytes,
            max_nesting=settings.max_nesting,
            workers=service.body_workers,
        ),
        Middleware(HeadAsGet),
    ]
