"""What the routes take and answer, for the OpenAPI document: they read bodies themselves, so FastAPI cannot know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from inlay.api.openai.bodies import NO_EFFECT, ChatBody, CompletionBody
from inlay.policy import POSITIONS, WORDS

_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _COUNT}

#: Status → what it means.
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
    507: "The request needs more memory for keys and values than there is.",
}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_CALL: dict[str, Any] = {
    "object": _TEXT,
    "id": _TEXT,
    "created": _COUNT,
    "model": _TEXT,
    "choices": {"type": "array", "minItems": 1},
}
_ANSWER = _object(**_CALL, usage=_object(prompt_tokens=_COUNT), inlay=_object(exact_tokens=_COUNT))
_MODEL = _object(
    id=_TEXT,
    object=_TEXT,
    created=_COUNT,
    owned_by=_TEXT,
    max_model_len=_COUNT,
    default_sampling_params={"type": "object"},
)
_SCHEMAS: dict[str, Any] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param={}, code={})),
    "Tokenize": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: {"$ref": _REF.format(model=f"ChatBody/properties/{name}")} for name in ("messages", "tools")},
            **{
                name: {"$ref": _REF.format(model=f"CompletionBody/properties/{name}")}
                for name in ("model", "pml", "positions", "prompt", "reuse")
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
    ok: dict[str, Any], *, body: str | None = None, stream: bool = False, wrong: tuple[int, ...]
) -> dict[str, Any]:
    """Arguments of a route: what it answers, the name of its body's schema, and in which ways it can fail."""
    content: dict[str, Any] = {"application/json": {"schema": ok}}
    if stream:
        content["text/event-stream"] = {"schema": _TEXT}
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    responses = {status: {"description": _WRONG[status], "content": error} for status in wrong}
    found: dict[str, Any] = {"responses": {200: {"description": "All went well.", "content": content}, **responses}}
    if body is not None:
        schema = {"$ref": _REF.format(model=body)}
        found["openapi_extra"] = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
    return found


_BODY = (400, 401, 403, 404, 408, 411, 413, 415, 429, 503)
CHAT = _route(_ANSWER, body="ChatBody", stream=True, wrong=(*_BODY, 504, 507))
COMPLETIONS = _route(_ANSWER, body="CompletionBody", stream=True, wrong=(*_BODY, 504, 507))
TOKENIZE = _route(_object(count=_COUNT, max_model_len=_COUNT, tokens=_IDS), body="Tokenize", wrong=_BODY)
DETOKENIZE = _route(_object(prompt=_TEXT), body="Detokenize", wrong=_BODY)
MODELS = _route(_object(object=_TEXT, data={"type": "array", "items": _MODEL}), wrong=(401, 503))
MODEL = _route(_MODEL, wrong=(401, 404, 503))
HEALTH = _route(_object(status=_TEXT), wrong=(503,))
READY = _route(_object(status=_TEXT), wrong=(503,))
VERSION = _route(_object(version=_TEXT), wrong=())


def describe(app: FastAPI, names: Sequence[str], root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document of an app, made once. names: of its model. root_path: in front of its paths."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        if root_path:
            document["servers"] = [{"url": root_path}]
        components = document.setdefault("components", {})
        components["schemas"] = {**components.get("schemas", {}), **_bodies(names), **_SCHEMAS}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's; here it is a 400
        app.openapi_schema = document
    return app.openapi_schema


def _bodies(names: Sequence[str]) -> dict[str, Any]:
    """The schemas of both bodies and of their parts, with what only a server knows, and the fields without effect."""
    _, made = models_json_schema([(ChatBody, "validation"), (CompletionBody, "validation")], ref_template=_REF)
    words = {"model": names, "reuse": WORDS, "positions": POSITIONS}
    schemas: dict[str, Any] = made["$defs"]
    for name in ("ChatBody", "CompletionBody"):
        fields = schemas[name]["properties"]
        fields.update({field: {"description": "Accepted, and without effect."} for field in NO_EFFECT})
        for field, allowed in words.items():
            fields[field]["anyOf"] = [{"enum": list(allowed)}, {"type": "null"}]
    return schemas
