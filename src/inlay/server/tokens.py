"""Token ids of prompts, and text of token ids: ``/tokenize`` and ``/detokenize`` as in vLLM, and Anthropic's count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inlay.api.anthropic import Endpoint as Anthropic
from inlay.api.call import Call
from inlay.api.failures import BodyError, not_an_object
from inlay.api.openai import Endpoint
from inlay.client.async_llm import AsyncLLM
from inlay.policy import FIELDS as POLICY_FIELDS
from inlay.prompt.inputs import CHAT_OPTIONS, check_ids
from inlay.server.completions import check_name, check_schemas, policy_of, read_call
from inlay.server.limits import Tenant
from inlay.server.routes import COUNT_TOKENS, DETOKENIZE, TOKENIZE
from inlay.server.service import Service
from inlay.server.threads import json_response
from inlay.wording import shown

router = APIRouter(tags=["tokens"])

#: The fields for a prompt are those of completions. Two more belong to /tokenize.
_PROMPT = ("messages", "model", "pml", "positions", "prompt", "reuse", *POLICY_FIELDS, "tools", *CHAT_OPTIONS)
_OWN = ("add_special_tokens", "return_token_strs")
FIELDS = (*_PROMPT, *_OWN)

#: Limits for one request: characters of a prompt, and ids of a text.
MAX_CHARACTERS = 2**20
MAX_IDS = 2**18

_ID_BYTES, _TEXT_BYTES = 8, 16  # approximate bytes in a response, of an id and of a token's text


@router.post("/tokenize", **TOKENIZE)
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, exactly as a completion would read it."""
    service: Service = request.app.state.service
    tenant: Tenant = request.state.tenant
    async with service.meter.request(tenant, tokens=False):
        body = _object(request.state.body, "/tokenize", FIELDS, '{"prompt": "…"}')
        special, strings = _switch(body, "add_special_tokens", True), _switch(body, "return_token_strs", False)
        prompt = {name: value for name, value in body.items() if name not in _OWN}
        call = await _call(prompt, service, tenant, request.state.body_bytes)
        policy = policy_of(call, tenant, service)
        ids = await service.llm.pools.prompts.run(_ids, service.llm, call, policy, tenant, special, owner=tenant.salt)

        def said() -> dict[str, Any]:
            found = {"count": len(ids), "max_model_len": service.llm.client.model.max_positions, "tokens": ids}
            return found | ({"token_strs": service.llm.tokenizer.convert_ids_to_tokens(ids)} if strings else {})

        return await json_response(said, len(ids) * (_ID_BYTES + (_TEXT_BYTES if strings else 0)))


@router.post("/detokenize", **DETOKENIZE)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service: Service = request.app.state.service
    async with service.meter.request(request.state.tenant, tokens=False):
        body = _object(request.state.body, "/detokenize", ("model", "tokens"), '{"tokens": […]}')
        check_name(_text(body, "model"), service)
        given = body.get("tokens")
        if not isinstance(given, list) or not given:
            raise BodyError(f"tokens is {shown(given)}; it must be a list of token ids", param="tokens")
        if len(given) > MAX_IDS:
            message = f"tokens has {len(given):,} ids, and {MAX_IDS:,} are taken at once; send them in parts"
            raise BodyError(message, param="tokens")
        text = await service.llm.pools.prompts.run(_text_of, service.llm, given, owner=request.state.tenant.salt)
        return await json_response(lambda: {"prompt": text}, len(text))


@router.post(Anthropic.COUNT, **COUNT_TOKENS)
async def count_tokens(request: Request) -> Response:
    """The number of tokens of a message's prompt, exactly as /v1/messages would read it."""
    service: Service = request.app.state.service
    tenant: Tenant = request.state.tenant
    async with service.meter.request(tenant, tokens=False):
        state = request.state
        call = (await read_call(service, Anthropic.COUNT, state.body, tenant=tenant, size=state.body_bytes)).call
        check_name(call.model, service)
        _check_length(call.prompts[0], "messages")
        policy = policy_of(call, tenant, service)
        ids = await service.llm.pools.prompts.run(_ids, service.llm, call, policy, tenant, True, owner=tenant.salt)
        return await json_response(lambda: {"input_tokens": len(ids)}, _ID_BYTES)


def _text_of(llm: AsyncLLM, ids: list[Any]) -> str:
    return str(llm.tokenizer.decode(check_ids(ids, llm.vocab_size, what="tokens"), clean_up_tokenization_spaces=False))


def _object(body: Any, path: str, fields: tuple[str, ...], example: str) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise not_an_object(body, example)
    for name in body:
        if name not in fields:
            message = f"{path} takes no field {shown(name)}; it takes {', '.join(sorted(fields))}"
            raise BodyError(message, param=str(name), code="unknown_field")
    return body


def _switch(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BodyError(f"{name} is {shown(value)}; it must be true or false", param=name)
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BodyError(f"{name} is {shown(value)}; it must be a text", param=name)
    return value


async def _call(body: Mapping[str, Any], service: Service, tenant: Tenant, size: int) -> Call:
    endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
    call = (await read_call(service, endpoint, body, tenant=tenant, size=size)).call
    check_name(call.model, service)
    check_schemas(call, service, tenant)
    if len(call.prompts) > 1:
        raise BodyError(f"prompt is a list of {len(call.prompts)} prompts; tokenize them one by one", param="prompt")
    _check_length(call.prompts[0], "messages" if endpoint is Endpoint.CHAT else "prompt")
    return call


def _check_length(prompt: Any, field: str) -> None:
    """Raise BodyError for more text than one request may count. ``field`` is the body's field that has it."""
    length = _length(prompt)
    if length > MAX_CHARACTERS:
        message = f"the prompt has {length:,} characters, and {MAX_CHARACTERS:,} are counted at once; send it in parts"
        raise BodyError(message, param=field)


def _length(prompt: Any) -> int:
    """Count the characters of all texts in a prompt. Each token id counts as one."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(map(_length, prompt.values()))
    return sum(map(_length, prompt)) if isinstance(prompt, list | tuple) else 1


def _ids(llm: AsyncLLM, call: Call, reuse: str, tenant: Tenant, special: bool) -> list[int]:
    prompt = call.prompts[0]
    if isinstance(prompt, str) and not special:
        return list(llm.tokenizer.encode(prompt, add_special_tokens=False))
    return list(llm.lay_out(prompt, reuse=reuse, positions=call.positions, cache_salt=tenant.salt).ids)
