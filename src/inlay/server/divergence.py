"""``/v1/divergence``: the divergence of a tenant's answers from full prefill, and their fallback policies.

``/v1/drift`` is its deprecated name. See docs/guides/reuse-policies.md, "Shadow sampling".
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from inlay.server.errors import JSONBytes
from inlay.server.routes import DIVERGENCE, LIFTED
from inlay.server.schemas import asking
from inlay.types import DivergenceStats

router = APIRouter(tags=["server"])

Name = Annotated[str | None, Query(description="of this schema alone")]

_DIGITS = 6  # of numbers in a response


@router.get("/v1/drift", deprecated=True, **DIVERGENCE)
@router.get("/v1/divergence", **DIVERGENCE)
async def divergence(request: Request) -> Response:
    """The divergence of the tenant's own answers, by schema and policy."""
    service, tenant = asking(request, only=())
    async with service.meter.request(tenant, tokens=False):
        config, found = service.llm.config, service.llm.divergence(cache_salt=tenant.salt)
        data = [_told(one) for one in found]
        return JSONBytes(
            {"object": "list", "shadow": config.shadow, "threshold": config.shadow_threshold, "data": data}
        )


@router.delete("/v1/drift", deprecated=True, **LIFTED)
@router.delete("/v1/divergence", **LIFTED)
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
