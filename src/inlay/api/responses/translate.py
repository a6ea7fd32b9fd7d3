"""Translates a checked body of the Responses API into a call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from inlay.api.call import Call, StoredAnswer
from inlay.api.failures import MAX_NAME, BodyError
from inlay.api.forms import MAX_MESSAGES
from inlay.api.reading import all_of
from inlay.api.reasoning import ModelReasoning, ReasoningUse, reasons, variables_for
from inlay.api.responses.bodies import (
    AllowedToolList,
    Endpoint,
    FunctionTool,
    Namespace,
    OptionalTool,
    ResponsesBody,
    ToolName,
)
from inlay.api.responses.items import AnyItem, FunctionCall, first_of_tools, form_of, problems_of, turns_of
from inlay.api.sampling import answer_schema, bounded_schema, call_of, chat_prompt
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.offer import Offer, OfferChoice, OfferedFunction, check_history, offer_tools, with_family_ids
from inlay.prompt.inputs import PromptInput
from inlay.wording import clip

_FIELDS = {"max_tokens": "max_output_tokens"}


def translate(
    body: ResponsesBody,
    *,
    default_max_tokens: int | None = None,
    tools: ModelTools | None = None,
    reasoning: ModelReasoning | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    stored: Mapping[str, StoredAnswer] = MappingProxyType({}),
) -> Call:
    """Translate a body into a call. See ``Dialect.translate``. Raises BodyError."""
    before = _before(body, stored)
    new = body.items
    if len(before) + len(new) > MAX_MESSAGES:
        message = f"the conversation has {len(before) + len(new):,} items, with those of the stored response"
        raise BodyError(f"{message}; it may have {MAX_MESSAGES:,}, so begin a new one", param="input")
    past = tuple(_parsed(item) for item in before)
    if problems := problems_of(new, {item.call_id for item in past if isinstance(item, FunctionCall)}):
        raise all_of(problems)
    items = (*past, *new)
    structure = _structure(body)
    offer, hidden = _offer(body, items, len(past), tools, structure)
    use = ReasoningUse(reasoning) if reasoning is not None and reasons(reasoning) else None
    ignored = [*body.ignored, *hidden]
    if use is not None and body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        ignored.append("reasoning.summary")
    most = body.max_output_tokens if body.max_output_tokens is not None else default_max_tokens
    return call_of(
        body,
        endpoint=Endpoint.RESPONSES,
        prompts=(_prompt(body, items, offer, tools, reasoning),),
        offer=offer,
        reasoning=use,
        structure=structure,
        defaults=defaults,
        given={} if most is None else {"max_tokens": most},
        names=_FIELDS,
        said_max_tokens=body.max_output_tokens is not None,
        structure_field="text",
        ignored=tuple(sorted(ignored)),
        keep_marked_alone=body.prompt_cache_options is not None and body.prompt_cache_options.mode == "explicit",
        store=None if body.store is False else (*before, *_with_ids(new)),
        repeated=_repeated(body),
    )


def _before(body: ResponsesBody, stored: Mapping[str, StoredAnswer]) -> tuple[Mapping[str, Any], ...]:
    """Return the items of the stored response that a body continues. Raises BodyError, status 404."""
    name = body.previous_response_id
    if name is None:
        return ()
    found = stored.get(name)
    if found is None:
        message = f"there is no stored response {clip(name, MAX_NAME)!r}; send the whole conversation as input"
        raise BodyError(message, param="previous_response_id", code="response_not_found", status=404)
    return (*found.input, *found.document["output"])


def _parsed(item: Mapping[str, Any]) -> AnyItem:
    form = form_of(item)
    assert form is not None, "items were checked before they were stored"
    made: Any = form.model_validate({name: value for name, value in item.items() if value is not None})
    return made  # type: ignore[no-any-return]


def _with_ids(items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """Return items as they are stored, each with an id."""
    made = []
    for number, item in enumerate(items):
        document = {"type": "message", **item.model_dump(exclude_none=True)}
        text = json.dumps([number, document], default=str)
        made.append({**document, "id": document.get("id") or f"item_{hashlib.sha256(text.encode()).hexdigest()[:24]}"})
    return made


def _prompt(
    body: ResponsesBody,
    items: Sequence[AnyItem],
    offer: Offer | None,
    tools: ModelTools | None,
    reasoning: ModelReasoning | None,
) -> PromptInput:
    ttl = None if body.prompt_cache_options is None else body.prompt_cache_options.ttl
    turns = with_family_ids(turns_of(body.instructions, items, ttl), tools)
    if not turns:
        raise BodyError("input has no message; give a text, or a list of items", param="input")
    effort = None if body.reasoning is None else body.reasoning.effort
    return chat_prompt(turns, offer, variables_for(effort, reasoning, "reasoning.effort"))


def _offer(
    body: ResponsesBody,
    items: Sequence[AnyItem],
    past: int,
    model: ModelTools | None,
    structure: Mapping[str, Any] | None,
) -> tuple[Offer | None, list[str]]:
    """Return the tools that a request offers to its model, and the places of those that the model does not see."""
    first = first_of_tools(items)
    check_history(first if first is None else max(0, first - past), "input", model)
    functions: list[OfferedFunction] = []
    hidden = []
    for number, tool in enumerate(body.tools or ()):
        if isinstance(tool, OptionalTool):
            hidden.append(f"tools[{number}]")
        elif isinstance(tool, Namespace):
            inner = enumerate(tool.tools)
            functions += [_function(one, f"tools[{number}].tools[{at}]", f"{tool.name}.") for at, one in inner]
        else:
            functions.append(_function(tool, f"tools[{number}]"))
    return offer_tools(functions, _choice(body), model, answer_schema(structure)), hidden


def _function(tool: FunctionTool, place: str, prefix: str = "") -> OfferedFunction:
    named, described = f"{place}.name", f"{place}.parameters"
    return OfferedFunction(prefix + tool.name, tool.description, tool.parameters, bool(tool.strict), named, described)


def _choice(body: ResponsesBody) -> OfferChoice:
    choice, one = body.tool_choice or "auto", body.parallel_tool_calls is False
    if isinstance(choice, ToolName):
        return OfferChoice(must=True, names=(_named(choice),), one=True)
    if isinstance(choice, AllowedToolList):
        return OfferChoice(must=choice.mode == "required", names=tuple(map(_named, choice.tools)), one=one)
    return OfferChoice(must=choice == "required", never=choice == "none", one=one)


def _named(tool: ToolName) -> str:
    return tool.name if tool.namespace is None else f"{tool.namespace}.{tool.name}"


def _structure(body: ResponsesBody) -> Mapping[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.schema_ is not None):
        remedy = 'write {"type": "json_schema", "name": "…", "schema": {…}}'
        raise BodyError(f'text.format has a schema exactly if its type is "json_schema"; {remedy}', param="text.format")
    if wanted.schema_ is not None:
        return {"json": bounded_schema(wanted.schema_, "text")}
    return {"json_object": True} if wanted.type == "json_object" else None


def _repeated(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a request that its response repeats."""
    given = body.model_dump(include={"instructions", "max_output_tokens", "metadata", "previous_response_id"})
    choice = body.tool_choice
    return {
        **given,
        "metadata": given["metadata"] or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None} if body.reasoning is None else _dumped(body.reasoning),
        "store": body.store is not False,
        "text": {"format": {"type": "text"}} if body.text is None or body.text.format is None else _dumped(body.text),
        "tool_choice": choice if isinstance(choice, str) else "auto" if choice is None else _dumped(choice),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "prompt_cache_key": None,
        "safety_identifier": None,
        "include_encrypted": "reasoning.encrypted_content" in (body.include or ()),
    }


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as a response repeats it. A function has its optional fields, as OpenResponses requires."""
    optional = dict.fromkeys(("description", "parameters", "strict")) if isinstance(tool, FunctionTool) else {}
    return {**optional, **_dumped(tool)}


def _dumped(form: Any) -> dict[str, Any]:
    made: dict[str, Any] = form.model_dump(by_alias=True, exclude_none=True)
    return made
