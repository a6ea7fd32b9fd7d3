"""Request bodies of the Messages API as pydantic models, and the rules to read them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from inlay.api import forms
from inlay.api.anthropic.blocks import (
    NAME,
    NAMED,
    REFUSED,
    AssistantMessage,
    SystemMessage,
    TextBlock,
    UserMessage,
    form_of,
    problems_of,
)
from inlay.api.call import AnswerRoute
from inlay.api.foreign import IGNORED
from inlay.api.foreign import REFUSED as FOREIGN
from inlay.api.forms import (
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
    CacheControl,
    CommonBody,
    StrictForm,
    described,
    of_object,
)
from inlay.api.reading import BodyRules, Members, all_of, read_fields


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

    max_tokens: int = Field(description=POSITIVE, ge=1)


RULES = BodyRules(
    forms={Endpoint.MESSAGES: MessagesBody, Endpoint.COUNT: CountBody},
    no_effect=NO_EFFECT,
    ignored=IGNORED,
    unsupported=UNSUPPORTED,
    longest={**forms.LONGEST, "messages": MAX_MESSAGES, "system": MAX_PARTS, "stop_sequences": MAX_STOPS},
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
