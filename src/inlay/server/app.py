"""Which names a server answers to that has no keys and serves its own machine alone: that machine's.

A web page can make its own name mean 127.0.0.1 for a moment ("DNS rebinding"), and then its scripts speak to a server
there as if it were their own. They cannot change the Host header, which says whom they believe to speak to.

The application: middlewares, routes and handlers of errors around one service.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

import inlay
from inlay.api.failures import BodyError
from inlay.async_llm import AsyncLLM
from inlay.errors import InlayError
from inlay.pml import Schema
from inlay.server import completions, health, metrics, models, schemas, tokens
from inlay.server.body import Guard
from inlay.server.drain import Gate
from inlay.server.errors import not_found, not_valid, refuse, said_wrong
from inlay.server.limits import RateHeaders
from inlay.server.logs import RequestLog
from inlay.server.openapi import describe
from inlay.server.run import HeadAsGet
from inlay.server.service import Service
from inlay.server.settings import ServerSettings
from inlay.server.tenants import Authenticate

#: What balancers ask over HTTP/1.0, which knows no Host. Pages always send one, and these paths tell them nothing.
PROBES = frozenset({"/health", "/ready"})


class LocalHosts:
    """ASGI middleware: answers 421 to requests for any host but localhost and loopback addresses.

    Requests for PROBES need not name one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("host")
            host = given or ""
            probed = given is None and scope["path"] in PROBES
            if not probed and not is_local(host):
                message = (
                    f"the Host is {host!r:.80}, and a server without keys that listens on this machine alone answers "
                    "to localhost; write that, or serve with --keys, or with --open-to-network"
                )
                await refuse(BodyError(message, code="misdirected_request", status=421), scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_local(host: str) -> bool:
    """Whether a Host header names the machine that it is sent to."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


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
