"""A small server around metrics, logs and schemas, with tenants whose keys are their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from inlay import AsyncLLM
from inlay.api.failures import BodyError
from inlay.errors import InlayError
from inlay.server import metrics, schemas
from inlay.server.body import BodyMiddleware
from inlay.server.errors import handle_http_exception, handle_inlay_error, handle_validation_error
from inlay.server.limits import EVERYBODY, Limits, Tenant
from inlay.server.logs import RequestLogMiddleware
from inlay.server.service import Service
from inlay.server.settings import ServerSettings
from inlay.server.tenants import AuthMiddleware
from tests.conftest import tiny

TENANTS = {
    "Bearer ann": Tenant("ann", "salt of ann", Limits(), admin=False),
    "Bearer bob": Tenant("bob", "salt of bob", Limits(), admin=False),
    "Bearer eve": Tenant("eve", "salt of eve", Limits(max_reuse="exact"), admin=False),
    "Bearer root": Tenant("root", "salt of root", Limits(), admin=True),
}


class Keys:
    """Tenants by their Authorization headers; without tenants, every request is accepted."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = tenants

    def of(self, authorization: str | None, *, from_api_key: bool = False) -> Tenant:
        if not self._tenants:
            return EVERYBODY
        if authorization not in self._tenants:
            raise BodyError("the API key is wrong", code="invalid_api_key", status=401)
        return self._tenants[authorization]


def model(**settings: Any) -> AsyncLLM:
    return AsyncLLM(tiny("llama"), kv_memory="16MiB", chunk_size=8, **settings)


def service(llm: AsyncLLM, tenants: Mapping[str, Tenant] = TENANTS, **settings: Any) -> Service:
    made = Service(llm, ServerSettings(**settings))
    made.tenants = Keys(tenants)  # type: ignore[assignment]
    return made


def server(made: Service) -> FastAPI:
    """The routes of schemas and metrics, behind the server's middleware."""
    app = FastAPI()
    app.state.service = made
    app.include_router(schemas.router)
    app.include_router(metrics.router)
    app.add_exception_handler(InlayError, handle_inlay_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_middleware(BodyMiddleware, max_body_bytes=2**20)
    app.add_middleware(AuthMiddleware, tenants=made.tenants)
    app.add_middleware(RequestLogMiddleware, counts=made.metrics)
    return app


def records(stream: StringIO) -> list[dict[str, Any]]:
    """The lines of a log in JSON."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]
