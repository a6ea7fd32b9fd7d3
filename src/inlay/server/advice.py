"""``/v1/schemas/{name}/advice``: the findings of ``inlay schema lint`` for a schema of the server."""

from __future__ import annotations

from itertools import islice
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inlay.authoring.lint import Finding, lint_schema
from inlay.pml.problems import JSONPlace
from inlay.server.errors import JSONBytes
from inlay.server.routes import ADVICE
from inlay.server.schemas import Public, asking

router = APIRouter(tags=["schemas"])

_MOST = 200  # findings in an answer


@router.get("/v1/schemas/{name}/advice", **ADVICE)
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
