"""Request bodies of the Messages API as pydantic models, the rules to read them, and their translation into a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Unpack

from pydantic import Field

from inlay.api import reading
from inlay.api.anthropic.blocks import (
    NAME,
    NAMED,
    REFUSED,
    AssistantMessage,
    SystemMessage,
    TextBlock,
    UserMessage,
    first_of_tools,
    form_of,
    problems_of,
    turns_of,
)
from inlay.api.call import AnswerRoute, Call, OfModel
from inlay.api.failures import BodyError
from inlay.api.foreign import IGNORED
from inlay.api.foreign import REFUSED as FOREIGN
from inlay.api.reading import (
    INTEGER,
    MARKS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
    POSITIVE,
    STRING,
    SWITCH,
    TEXT,
    BodyRules,
    CacheControl,
    CommonBody,
    Members,
    StrictForm,
    all_of,
    described,
    of_object,
    read_fields,
)
from inlay.api.reasoning import ModelReasoning, ReasoningUse, effort_variables, reasons, switch_on
from inlay.api.sampling import answer_schema, bounded_schema, call_of, chat_prompt
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.offer import Offer, OfferChoice, OfferedFunction, check_history, offer_tools, with_family_ids


class Endpoint(StrEnum):
    """The paths of the API."""

    MESSAGES = "/v1/messages"
    COUNT = "/v1/messages/count_tokens"


#: Accepted fields that clients often send and that do not change an answer.
NO_EFFECT = (
    "betas",
    "context_management",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)

#: Unsupported fields → accepted neutral values, and the remedy for others.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **{name: rule for name, rule in FOREIGN.items() if name not in ("system",)},
    "compaction": ((), "inlay does not shorten conversations; leave it out"),
    "container": ((), "inlay has no containers; leave it out"),
    "fallbacks": (([],), "one model answers; write it as model"),
    "mcp_servers": (([],), "inlay runs no tools; give their tools as tools"),
    "max_tokens_to_sample": ((), "write max_tokens"),
    "n": ((1,), "a message has one answer; send several requests"),
    "output_format": ((), 'write "output_config": {"format": {"type": "json_schema", "schema": {…}}}'),
    "prompt": ((), "write messages"),
    "response_format": ((), 'write "output_config": {"format": {"type": "json_schema", "schema": {…}}}'),
    "stop": ((), "write stop_sequences"),
    "thread": ((), "send the whole conversation; its beginning is found in the cache"),
}

_SYSTEM = f'a text, or a list of at most {MAX_PARTS:,} blocks {{"type": "text", "text": "…"}}'
_TOOL = '{"name": "…", "description": "…", "input_schema": {a JSON Schema}}'


class Tool(StrictForm):
    """A tool of the client.

    ``strict`` is accepted: a grammar enforces arguments if it enforces a call.
    """

    type: Literal["custom"] | None = Field(None, description='"custom", or left out; inlay has no tools of its own')
    name: str = Field(description=f"a name of {NAMED}", pattern=NAME)
    description: str | None = Field(None, description=TEXT)
    input_schema: dict[str, Any] = Field(description="the JSON Schema of an object")
    strict: bool | None = Field(None, description=SWITCH)
    cache_control: CacheControl | None = Field(None, description=MARKS["cache_control"])
    eager_input_streaming: bool | None = Field(None, description=f"{SWITCH}; it has no effect")
    defer_loading: Literal[False] | None = Field(None, description="false; the model sees all tools")
    allowed_callers: list[Literal["direct"]] | None = Field(None, description='["direct"]')
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="left out; write examples into the description"
    )


class ToolChoice(StrictForm):
    """The tools that an answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictForm):
    """The reasoning before an answer. ``display`` "omitted" leaves it out of the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class JSONFormat(StrictForm):
    """The schema of an answer. It is always enforced."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictForm):
    """The form of an answer, and the effort of its reasoning."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JSONFormat | None = None


_Stop = Annotated[str, Field(max_length=MAX_STOP)]


class CountBody(CommonBody):
    """The body of /v1/messages/count_tokens."""

    example: ClassVar[str] = '{"messages": […]}'

    # Anthropic's own field of this name is an object, which has no effect here.
    diagnostics: bool | dict[str, Any] | None = Field(  # type: ignore[assignment]
        None, description=f"{SWITCH}; if true, the answer says why tokens were computed"
    )
    messages: Annotated[list[UserMessage | AssistantMessage | SystemMessage], Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list,
        description=f'a list of 1 to {MAX_MESSAGES:,} messages {{"role": "user", "content": "…"}}',
    )
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = Field(None, description=_SYSTEM)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description=f"a list of at most {MAX_TOOLS} tools {_TOOL}"
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description='{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": "…"}, each with '
        'or without "disable_parallel_tool_use": true',
    )
    thinking: Thinking | None = Field(
        None, description='{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"} or {"type": "disabled"}'
    )
    output_config: OutputConfig | None = Field(
        None,
        description='an object with "effort": "low", "medium", "high", "xhigh" or "max", and '
        '"format": {"type": "json_schema", "schema": {…}}',
    )
    cache_control: CacheControl | None = Field(None, description=MARKS["cache_control"])
    max_tokens: int | None = Field(None, description=POSITIVE, ge=1)
    stop_sequences: Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = Field(
        None, description=f"a list of at most {MAX_STOPS} texts of at most {MAX_STOP:,} characters each"
    )


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    example: ClassVar[str] = '{"max_tokens": 100, "messages": […]}'

    max_tokens: int = Field(description=POSITIVE, ge=1)


RULES = BodyRules(
    forms={Endpoint.MESSAGES: MessagesBody, Endpoint.COUNT: CountBody},
    no_effect=NO_EFFECT,
    ignored=IGNORED,
    unsupported=UNSUPPORTED,
    longest={**reading.LONGEST, "messages": MAX_MESSAGES, "system": MAX_PARTS, "stop_sequences": MAX_STOPS},
    largest={"tools": 50_000, "output_config": 50_000},
    members={
        "messages": Members(form_of, "message", 'a message {"role": "user", "content": "…"}'),
        "system": Members(lambda _: TextBlock, "block", 'a block {"type": "text", "text": "…"}'),
        "tools": Members(lambda _: Tool, "tool", f"a tool {_TOOL}"),
    },
    kinds={
        "messages": {"content": "block", "cache_control": "mark"},
        "system": {"cache_control": "mark"},
        "block": {"cache_control": "mark", "source": "source", "content": "block", "citations": "mark"},
        "source": {"content": "block"},
        "mark": {},
        "cache_control": {},
        "tools": {"cache_control": "mark"},
        "tool_choice": {},
        "thinking": {},
        "output_config": {"format": "format"},
        "format": {},
    },
    refused=REFUSED,
)


def read_body(raw: Any, endpoint: str) -> CountBody:
    """Check a request and return its body, without the fields that have no effect.

    Raises BodyError, which names up to MAX_PROBLEMS problems.
    """
    body, problems = read_fields(raw, endpoint, RULES)
    assert body is None or isinstance(body, CountBody), "the rules have no other form"
    if body is not None and not problems:
        if not body.messages:
            wanted = CountBody.model_fields["messages"].description
            problems.append(("messages", "missing_field", f"there are no messages; give {wanted}"))
        problems += problems_of(body.messages)
    if problems or body is None:
        raise all_of(problems)
    return body


_PREFIX = "Anthropic"
_ERROR = of_object(type={"const": "error"}, error=of_object(type=STRING, message=STRING))
_ANSWER = of_object(
    id=STRING,
    type={"const": "message"},
    role=STRING,
    model=STRING,
    content={"type": "array"},
    usage=of_object(input_tokens=INTEGER, output_tokens=INTEGER),
    inlay=of_object(exact_tokens=INTEGER),
)

ROUTES = (
    AnswerRoute(
        Endpoint.MESSAGES,
        "messages",
        "The next turn of a conversation, in the form of Anthropic's Messages API.",
        body=f"{_PREFIX}MessagesBody",
        error=f"{_PREFIX}Error",
        answer=_ANSWER,
    ),
)


def components(names: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of both bodies, their parts, and errors.

    Args:
        names: of the served model.
    """
    bodies = [MessagesBody, CountBody]
    made = described(bodies, names, no_effect=NO_EFFECT, ignored=IGNORED, prefix=_PREFIX)
    return {**made, f"{_PREFIX}Error": _ERROR}


_FIELDS = {"stop": "stop_sequences"}


def translate(body: CountBody, **model: Unpack[OfModel]) -> Call:
    """Translate a body into a call. See ``Dialect.translate``. Raises BodyError."""
    tools, reasoning = model.get("tools"), model.get("reasoning")
    structure = _structure(body)
    offer = _offer(body, tools, structure)
    turns = with_family_ids(turns_of(body.system, body.messages, body.cache_control), tools)
    if not turns:
        raise BodyError("messages has no text; give a message of the user", param="messages")
    last = _to_continue(body, turns)
    variables, ignored = _thinking(body, reasoning)
    use = None
    if reasons(reasoning):
        assert reasoning is not None, "a model that reasons has a form of it"
        use = ReasoningUse(reasoning, _shows_thinking(body), last)
    options = {} if last is None else {"continue_final_message": True}
    stop = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
    return call_of(
        body,
        endpoint=Endpoint.MESSAGES,
        prompts=(chat_prompt(turns, offer, variables, **options),),
        offer=offer,
        reasoning=use,
        structure=structure,
        defaults=model.get("defaults", {}),
        given={"max_tokens": body.max_tokens, **stop},
        names=_FIELDS,
        said_max_tokens=True,
        structure_field="output_config",
        ignored=tuple(sorted((*body.ignored, *ignored))),
    )


def _offer(body: CountBody, model: ModelTools | None, structure: Mapping[str, Any] | None) -> Offer | None:
    check_history(first_of_tools(body.messages), "messages", model)
    functions = [
        OfferedFunction(
            tool.name,
            tool.description,
            tool.input_schema,
            bool(tool.strict),
            f"tools[{number}].name",
            f"tools[{number}].input_schema",
            None if tool.cache_control is None else tool.cache_control.mark,
        )
        for number, tool in enumerate(body.tools or ())
    ]
    return offer_tools(functions, _choice(body), model, answer_schema(structure))


def _choice(body: CountBody) -> OfferChoice:
    given = body.tool_choice
    if given is None:
        return OfferChoice()
    if (given.type == "tool") != (given.name is not None):
        message = "tool_choice has a name exactly if its type is 'tool'"
        raise BodyError(f'{message}; write {{"type": "tool", "name": "…"}}', param="tool_choice")
    return OfferChoice(
        must=given.type in ("any", "tool"),
        never=given.type == "none",
        names=None if given.name is None else (given.name,),
        one=bool(given.disable_parallel_tool_use) or given.type == "tool",
    )


def _structure(body: CountBody) -> Mapping[str, Any] | None:
    wanted = None if body.output_config is None else body.output_config.format
    return None if wanted is None else {"json": bounded_schema(wanted.schema_, "output_config")}


def _to_continue(body: CountBody, turns: list[dict[str, Any]]) -> str | None:
    """Return the start of the answer that the request ends with, or None. Raises BodyError."""
    if not isinstance(body.messages[-1], AssistantMessage) or not turns or turns[-1]["role"] != "assistant":
        return None
    place = f"messages[{len(body.messages) - 1}]"
    if turns[-1].get("tool_calls"):
        raise BodyError(f"{place} ends with a call; send the result of the call behind it", param=place)
    content = turns[-1]["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if not text:
        raise BodyError(f"{place} has no text that the answer could continue; leave it out", param=place)
    return text


def _thinking(body: CountBody, model: ModelReasoning | None) -> tuple[dict[str, Any], list[str]]:
    """Return the template variables for the reasoning that a body asks for, and the fields without effect."""
    ignored = []
    thinking, effort = body.thinking, None if body.output_config is None else body.output_config.effort
    variables: dict[str, Any] = {}
    if thinking is not None:
        if thinking.budget_tokens is not None:
            ignored.append("thinking.budget_tokens")
        off = thinking.type == "disabled"
        found = effort_variables("none", model) if off else switch_on(model)
        if found is None or (not off and not reasons(model)):
            ignored.append("thinking")
        variables |= found or {}
        effort = None if off else effort
    if effort is not None:
        found = effort_variables(effort, model)
        if found is None:
            ignored.append("output_config.effort")
        variables |= found or {}
    return variables, ignored


def _shows_thinking(body: CountBody) -> bool:
    thinking = body.thinking
    return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")
