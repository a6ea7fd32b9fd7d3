"""How the server is: whether it lives, whether it answers, and what it is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import inlay
from inlay.api.openai import BodyError
from inlay.server.drain import stopped
from inlay.server.errors import JSONBytes
from inlay.server.openapi import HEALTH, READY, VERSION
from inlay.server.service import Service

_RETRY_S = 1.0

router = APIRouter(tags=["server"])


@router.get("/health", **HEALTH)
async def health(request: Request) -> Response:
    """The process lives, and so does its engine."""
    service: Service = request.app.state.service
    await service.llm.check_health()
    return JSONBytes({"status": "alive"})


@router.get("/ready", **READY)
async def ready(request: Request) -> Response:
    """Requests are answered: the model is there, the first schemas are encoded, and the server is not stopping."""
    service: Service = request.app.state.service
    if service.flights.stopping:
        raise stopped()
    await service.llm.check_health()
    if not service.ready:
        message = "the server is starting; try again in a moment"
        raise BodyError(message, code="not_ready", status=503, retry_after_s=_RETRY_S)
    service.check_moving()
    return JSONBytes({"status": "ready"})


@router.get("/version", **VERSION)
async def version() -> Response:
    """Of inlay."""
    return JSONBytes({"version": inlay.__version__})
