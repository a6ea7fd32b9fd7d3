"""Routes for stored responses: read, delete, cancel, and list their input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from inlay.api.call import StoredAnswer
from inlay.api.failures import MAX_NAME, BodyError
from inlay.server.errors import JSONBytes
from inlay.server.limits import Tenant
from inlay.server.routes import DELETED_RESPONSE, INPUT_ITEMS, STORED_RESPONSE
from inlay.server.service import Service
from inlay.server.threads import json_response, off_loop
from inlay.wording import clip

router = APIRouter(tags=["answers"])

_ITEM_BYTES = 256  # a rough size of an input item in a response


@router.get("/v1/responses/{name}", **STORED_RESPONSE)
async def stored_response(request: Request, name: str, stream: Literal["false"] = "false") -> Response:
    """A stored response of the caller. Finished responses are not streamed again."""
    answer = await _answer(request, name)
    return await json_response(lambda: answer.document, _size(answer))


@router.delete("/v1/responses/{name}", **DELETED_RESPONSE)
async def delete_response(request: Request, name: str) -> Response:
    """Delete a stored response of the caller."""
    service, tenant = _caller(request)
    if not service.stored.delete(tenant.owner, name):
        raise _missing(name)
    return JSONBytes({"id": name, "object": "response", "deleted": True})


@router.post("/v1/responses/{name}/cancel", **STORED_RESPONSE)
async def cancel_response(request: Request, name: str) -> Response:
    """Refuse to cancel a response, because a stored one is finished."""
    answer = await _answer(request, name)
    message = f"the response is {answer.document['status']}; only a response in the background can be cancelled"
    raise BodyError(f"{message}, and to end a running one, close its connection", code="not_cancellable")


@router.get("/v1/responses/{name}/input_items", **INPUT_ITEMS)
async def input_items(
    request: Request,
    name: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """The input items of a stored response, with those of the responses that it continues."""
    answer = await _answer(request, name)
    items = list(answer.input) if order == "asc" else list(reversed(answer.input))
    if after is not None:
        found = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if found is None:
            raise BodyError(f"the response has no item {clip(after, MAX_NAME)!r}; leave after out", param="after")
        items = items[found + 1 :]
    page = items[:limit]

    def listed() -> dict[str, Any]:
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}

    return await json_response(listed, len(page) * _ITEM_BYTES)


def _caller(request: Request) -> tuple[Service, Tenant]:
    return request.app.state.service, request.state.tenant


async def _answer(request: Request, name: str) -> StoredAnswer:
    """Return a stored response of the caller. Raises BodyError, status 404, also for those of others."""
    service, tenant = _caller(request)
    found = await off_loop(lambda: service.stored.get(tenant.owner, name))
    if found is None:
        raise _missing(name)
    return found


def _missing(name: str) -> BodyError:
    message = f"there is no stored response {clip(name, MAX_NAME)!r}; it was never stored, was deleted, or is too old"
    return BodyError(message, code="response_not_found", status=404)


def _size(answer: StoredAnswer) -> int:
    return _ITEM_BYTES * (1 + len(answer.document["output"]))
