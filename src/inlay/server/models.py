"""``/v1/models``: the one model there is, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inlay.server.errors import JSONBytes
from inlay.server.openapi import MODEL, MODELS
from inlay.server.requests import check_name
from inlay.server.service import Service
from inlay.server.settings import public_name

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", **MODELS)
async def models(request: Request) -> Response:
    """All names of the model."""
    service: Service = request.app.state.service
    return JSONBytes({"object": "list", "data": [_model(service, name) for name in service.settings.served_names]})


@router.get("/{name:path}", **MODEL)
async def model(request: Request, name: str) -> Response:
    """What is known of the model under one of its names."""
    service: Service = request.app.state.service
    check_name(name, service.settings)
    return JSONBytes(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's model object, with vLLM's ``root`` and ``max_model_len``, and what requests get that do not say."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "inlay",
        "root": public_name(service.llm.model_name),
        "parent": None,
        "max_model_len": service.llm.loaded.spec.max_positions,
        "default_sampling_params": service.llm.sampling_defaults,
    }
