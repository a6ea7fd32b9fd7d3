"""Request bodies of the Responses API as pydantic models, the rules to read them, and their translation into a call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Unpack

from pydantic import ConfigDict, Field

from inlay.api import reading
from inlay.api.call import AnswerRoute, Call, OfModel, StoredAnswer
from inlay.api.failures import MAX_NAME, BodyError
from inlay.api.foreign import IGNORED
from inlay.api.foreign import REFUSED as FOREIGN
from inlay.api.openai.bodies import NO_EFFECT as CHATS_NO_EFFECT
from inlay.api.openai.messages import CacheOptions
from inlay.api.reading import (
    INTEGER,
    MAX_MESSAGES,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
    POSITIVE,
    STRING,
    SWITCH,
    TEXT,
    BodyRules,
    CommonBody,
    Members,
    PartForms,
    StrictForm,
    all_of,
    described,
    of_object,
    read_fields,
)
from inlay.api.reasoning import ReasoningUse, effort_variables, reasons, variables_for
from inlay.api.responses.items import (
    FORMS,
    NAME,
    NAMED,
    REFUSED,
    AnyItem,
    FunctionCall,
    MessageItem,
    first_of_tools,
    form_of,
    problems_of,
    turns_of,
)
from inlay.api.sampling import answer_schema, bounded_schema, call_of, chat_prompt
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.offer import Offer, OfferChoice, OfferedFunction, check_history, offer_tools, with_family_ids
from inlay.prompt.inputs import PromptInput
from inlay.wording import clip, shown


class Endpoint(StrEnum):
    """The path of the API for new responses."""

    RESPONSES = "/v1/responses"


#: Accepted fields that clients often send and that do not change an answer.
NO_EFFECT = tuple(
    sorted({*CHATS_NO_EFFECT, "client_metadata", "stream_options", "comparison_response_id"} - {"metadata", "store"})
)

#: Unsupported fields → accepted neutral values, and the remedy for others.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **{name: rule for name, rule in FOREIGN.items() if name != "reasoning"},
    "background": ((False,), "inlay answers while the request is open; leave it out, and stream if it takes long"),
    "context_management": (([],), "inlay does not shorten conversations; leave it out"),
    "conversation": ((), "write previous_response_id, or send the whole conversation"),
    "max_tokens": ((), "write max_output_tokens"),
    "max_tool_calls": ((), "inlay runs no tools; leave it out"),
    "messages": ((), "write input"),
    "moderation": ((), "inlay moderates nothing; leave it out"),
    "n": ((1,), "a response has one answer; send several requests"),
    "prompt": ((), "inlay stores no prompts; write input, or send a schema's prompt to /v1/chat/completions"),
    "response_format": ((), 'write "text": {"format": …}'),
    "top_logprobs": ((0,), "responses have no log-probabilities; send the request to /v1/chat/completions"),
    "truncation": (("disabled",), "a prompt that is too long is an error; write truncate_prompt_tokens"),
}

#: Tools that inlay cannot run, and that an answer may do without. They are hidden from the model.
OPTIONAL_TOOLS = ("web_search", "web_search_2025_08_26", "web_search_preview")

_FUNCTION = '{"type": "function", "name": "…", "parameters": {a JSON Schema}}'
_NO_TOOL = "inlay runs no tools; give functions"


class FunctionTool(StrictForm):
    """A function that a model may call.

    ``strict`` is accepted: a grammar enforces arguments if it enforces a call.
    """

    type: Literal["function"] = Field(description='"function"')
    name: str = Field(description=f"a name of {NAMED}", pattern=NAME)
    description: str | None = Field(None, description=TEXT)
    parameters: dict[str, Any] | None = Field(None, description="the JSON Schema of an object")
    strict: bool | None = Field(None, description=SWITCH)
    output_schema: dict[str, Any] | None = Field(None, description="an object; it has no effect")
    defer_loading: Literal[False] | None = Field(None, description="false; the model sees all tools")
    allowed_callers: list[Literal["direct"]] | None = Field(None, description='["direct"]')


class Namespace(StrictForm):
    """Functions under one name. The model reads the name in front of theirs, with a dot."""

    inside: ClassVar[PartForms] = {"tools": {"function": FunctionTool}}

    type: Literal["namespace"] = Field(description='"namespace"')
    name: str = Field(description=f"a name of {NAMED}", pattern=NAME)
    description: str | None = Field(None, description=TEXT)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(
        description=f"a list of functions {_FUNCTION}"
    )


class OptionalTool(StrictForm):
    """A tool that is hidden from the model."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview"]


_TOOLS: Mapping[str, type[StrictForm]] = {
    "function": FunctionTool,
    "namespace": Namespace,
    **dict.fromkeys(OPTIONAL_TOOLS, OptionalTool),
}


class ToolName(StrictForm):
    """A function by name, and its namespace if it has one."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


class AllowedToolList(StrictForm):
    """The tools that may be called, among those that the model sees. ``mode`` says if one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class TextFormat(StrictForm):
    """The form of an answer. A schema is always enforced, with any ``strict``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictForm):
    """The form of an answer. inlay has no setting for verbosity."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(StrictForm):
    """The reasoning before an answer. inlay returns it whole, and writes no summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


_Included = Literal[
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_Stop = Annotated[str, Field(max_length=MAX_STOP)]
_ITEM = '{"role": "user", "content": "…"}'


class ResponsesBody(CommonBody):
    """The body of /v1/responses."""

    example: ClassVar[str] = '{"input": "…"}'

    input: str | Annotated[list[Any], Field(max_length=MAX_MESSAGES)] | None = Field(
        None, description=f"a text, or a list of at most {MAX_MESSAGES:,} items {_ITEM}"
    )
    instructions: str | None = Field(None, description=TEXT)
    max_output_tokens: int | None = Field(None, description=POSITIVE, ge=1)
    tools: Annotated[list[FunctionTool | Namespace | OptionalTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description=f"a list of at most {MAX_TOOLS} tools {_FUNCTION}"
    )
    tool_choice: Literal["none", "auto", "required"] | ToolName | AllowedToolList | None = Field(
        None,
        description='"none", "auto", "required", {"type": "function", "name": "…"}, or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [{"type": …}]}',
    )
    parallel_tool_calls: bool | None = Field(None, description=SWITCH)
    text: TextOptions | None = Field(
        None,
        description='{"format": {"type": "text"}}, {"format": {"type": "json_object"}} or '
        '{"format": {"type": "json_schema", "name": "…", "schema": {…}}}; "verbosity" may be "medium"',
    )
    reasoning: Reasoning | None = Field(
        None,
        description='an object with "effort": "none", "minimal", "low", "medium", "high", "xhigh" or "max"',
    )
    include: Annotated[list[_Included], Field(fail_fast=True, max_length=16)] | None = Field(
        None, description='a list such as ["reasoning.encrypted_content"]; responses have no log-probabilities'
    )
    store: bool | None = Field(None, description=SWITCH)
    previous_response_id: str | None = Field(None, description="the id of a stored response", max_length=128)
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = Field(
        None, description="an object of at most 16 texts, of at most 512 characters each"
    )
    prompt_cache_options: CacheOptions | None = Field(
        None, description='{"mode": "implicit" or "explicit", "ttl": "30m" or "12h"}'
    )
    # of chats
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = Field(
        None, description=f"a text or a list of texts, at most {MAX_STOPS}, of at most {MAX_STOP:,} characters each"
    )

    @property
    def items(self) -> tuple[AnyItem, ...]:
        """The input as items."""
        if isinstance(self.input, str):
            return (MessageItem.model_validate({"role": "user", "content": self.input}),)
        return tuple(self.input or ())


class _UnknownItem(StrictForm):
    """An item of an unknown type, which has no valid form."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = Field(
        description='"message", "function_call", "function_call_output" or "reasoning"'
    )


class _UnknownTool(StrictForm):
    """A tool of an unknown type, which has no valid form."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function", "namespace"] = Field(description=f'"function": {_NO_TOOL}')


def _tool_form(tool: Any) -> type[StrictForm]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return _TOOLS.get(kind, _UnknownTool) if isinstance(kind, str) else _UnknownTool


def _item_form(item: Any) -> type[StrictForm]:
    return form_of(item) or _UnknownItem


RULES = BodyRules(
    forms={Endpoint.RESPONSES: ResponsesBody},
    no_effect=NO_EFFECT,
    ignored=IGNORED,
    unsupported=UNSUPPORTED,
    longest={**reading.LONGEST, "input": MAX_MESSAGES, "stop": MAX_STOPS, "metadata": 16},
    largest={"tools": 50_000, "text": 50_000},
    members={
        "input": Members(_item_form, "item", f"an item {_ITEM}"),
        "tools": Members(_tool_form, "tool", f"a tool {_FUNCTION}"),
    },
    kinds={
        "input": {"content": "part", "output": "part", "summary": "part", "cache_control": "mark"},
        "part": {"cache_control": "mark", "prompt_cache_breakpoint": "mark"},
        "mark": {},
        "tools": {"tools": "tools"},
        "tool_choice": {"tools": "tool_choice"},
        "text": {"format": "format"},
        "format": {},
        "reasoning": {},
        "prompt_cache_options": {},
    },
    refused=REFUSED,
)


def read_body(raw: Any, endpoint: str) -> ResponsesBody:
    """Check a request and return its body, without the fields that have no effect.

    Raises BodyError, which names up to MAX_PROBLEMS problems.
    """
    body, problems = read_fields(raw, endpoint, RULES)
    assert body is None or isinstance(body, ResponsesBody), "the rules have no other form"
    if isinstance(raw, Mapping) and isinstance(raw.get("input"), list):
        problems = [_of_refused(raw["input"], problem) for problem in problems]
    if body is not None and not problems and body.input is None and body.previous_response_id is None:
        problems.append(("input", "missing_field", "there is no input; give a text, or a list of items"))
    if problems or body is None:
        raise all_of(problems)
    return body


def _of_refused(items: list[Any], problem: tuple[str | None, str | None, str]) -> tuple[str | None, str | None, str]:
    """Return a problem. If its item has a type that only other servers read, the reason for that replaces the text."""
    for number, item in enumerate(items):
        place = f"input[{number}].type"
        kind = item.get("type") if isinstance(item, Mapping) else None
        if problem[0] == place and isinstance(kind, str) and kind in REFUSED:
            said = f"input[{number}] is of type {shown(kind)}, which is not supported: {REFUSED[kind]}"
            return place, "unsupported_content", said
    return problem


PREFIX = "Responses"
ANSWER = of_object(
    id=STRING,
    object={"const": "response"},
    created_at=INTEGER,
    model=STRING,
    status=STRING,
    output={"type": "array"},
    usage=of_object(input_tokens=INTEGER, output_tokens=INTEGER),
    inlay=of_object(exact_tokens=INTEGER),
)

ROUTES = (
    AnswerRoute(
        Endpoint.RESPONSES,
        "responses",
        "The answer to a text or to items of a conversation, in the form of OpenAI's Responses API.",
        body=f"{PREFIX}ResponsesBody",
        error="Error",
        answer=ANSWER,
    ),
)


def components(names: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of the body and its parts.

    Args:
        names: of the served model.
    """
    made = described([ResponsesBody], names, no_effect=NO_EFFECT, ignored=IGNORED, prefix=PREFIX, others=FORMS.values())
    items = [{"$ref": f"#/components/schemas/{PREFIX}{form.__name__}"} for form in FORMS.values()]
    fields = made[f"{PREFIX}ResponsesBody"]["properties"]
    for choice in fields["input"]["anyOf"]:
        if choice.get("type") == "array":
            choice["items"] = {"anyOf": items}
    return made


_FIELDS = {"max_tokens": "max_output_tokens"}


def translate(body: ResponsesBody, **model: Unpack[OfModel]) -> Call:
    """Translate a body into a call. See ``Dialect.translate``. Raises BodyError."""
    tools, reasoning = model.get("tools"), model.get("reasoning")
    before = _before(body, model.get("stored", {}))
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
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort == "none":  # an error where the model reasons all the same: its answer would cost more than expected
        variables: dict[str, Any] | None = variables_for(effort, reasoning, "reasoning.effort")
    else:
        variables = effort_variables(effort, reasoning)
    if variables is None:  # clients of this API send an effort to every model
        ignored.append("reasoning.effort")
    if use is not None and body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        ignored.append("reasoning.summary")
    most = body.max_output_tokens if body.max_output_tokens is not None else model.get("default_max_tokens")
    return call_of(
        body,
        endpoint=Endpoint.RESPONSES,
        prompts=(_prompt(body, items, offer, tools, variables or {}),),
        offer=offer,
        reasoning=use,
        structure=structure,
        defaults=model.get("defaults", {}),
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
    variables: Mapping[str, Any],
) -> PromptInput:
    ttl = None if body.prompt_cache_options is None else body.prompt_cache_options.ttl
    turns = with_family_ids(turns_of(body.instructions, items, ttl), tools)
    if not turns:
        raise BodyError("input has no message; give a text, or a list of items", param="input")
    return chat_prompt(turns, offer, variables)


def _offer(
    body: ResponsesBody,
    items: Sequence[AnyItem],
    past: int,
    model: ModelTools | None,
    structure: Mapping[str, Any] | None,
) -> tuple[Offer | None, list[str]]:
    """Return the tools that a request offers to its model, and the places of the tools that are hidden from it."""
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
