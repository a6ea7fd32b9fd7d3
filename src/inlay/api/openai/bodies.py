"""The bodies of requests as pydantic models: OpenAI's fields, those that vLLM adds, and inlay's own.

A field's description is what a sentence about a wrong value says that it must be. ``null`` is the same as leaving a
field out, as at OpenAI; it never gets here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from inlay.api.values import all_of

_MAX_LOGPROBS = 20

#: Fields that clients send by habit, and that change nothing about an answer: accepted, and never looked at.
NO_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

#: Fields that inlay has no use for → values that ask for nothing and are accepted, and what to do about others.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "inlay writes text alone; leave it out"),
    "best_of": ((1,), "inlay returns every answer that it makes; ask for several with n"),
    "echo": ((False,), "an answer does not repeat its prompt; leave it out"),
    "function_call": (("auto", "none"), "it is the old form of tool_choice; write that"),
    "functions": (([],), "it is the old form of tools; write those"),
    "guided_choice": ((), 'write "structured_outputs": {"choice": […]}'),
    "guided_json": ((), 'write "structured_outputs": {"json": …}'),
    "guided_regex": ((), 'write "structured_outputs": {"regex": …}'),
    "modalities": ((["text"],), "inlay writes text alone; leave it out"),
    "moderation": ((), "inlay moderates nothing; leave it out"),
    "parallel_tool_calls": ((True, False), "only chats call tools; leave it out"),
    "prediction": ((), "inlay takes no predicted output; leave it out"),
    "reasoning_effort": ((), "inlay has no setting for reasoning; write it into a message"),
    "suffix": (("",), "inlay does not fill gaps; leave it out"),
    "tool_choice": (("auto", "none"), "only chats call tools; leave it out"),
    "tools": (([],), "only chats call tools; send them to /v1/chat/completions"),
    "verbosity": ((), "inlay has no setting for verbosity; write it into a message"),
    "web_search_options": ((), "inlay does not search the web; leave it out"),
}

_WHOLE = "a whole number"
_NUMBER = "a number"
_SWITCH = "true or false"
_TEXT = "a text"
_POSITIVE = "a whole number of at least 1"
_CONTENT = (
    'a text, or a list of parts {"type": "text", "text": "…"}, each with or without '
    '"cache_control": {"type": "ephemeral"}; inlay reads text alone, in at most 1,024 parts'
)
_PROMPT = '{"schema": "…", "content": […]} or {"schema": "…", "imports": […], "text": "…"}'
_MAX_STOP = 1_024  # characters of one
_MAX_ID = 256  # characters
MAX_TOOLS = 128
MAX_MESSAGES = 8_192
MAX_PROMPTS = 4_096
MAX_PARTS = 1_024  # of one message

#: Fields that are lists or objects → how many members they may have; looked at before the members are.
LONGEST = {
    "logit_bias": 16_384,
    "messages": MAX_MESSAGES,
    "stop": 64,  # each is looked for behind every token
    "stop_token_ids": 4_096,
    "tools": MAX_TOOLS,
}

_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_NAMED = "letters, digits, _, . and -, at most 64 of them"
MAX_TAGS = 20_000  # of a prompt as PML; and values of one as JSON

#: Fields that hold JSON Schemas or grammars → how many values there may be in them, at any depth.
LARGEST = {"response_format": 50_000, "structured_outputs": 50_000, "tools": 50_000}


def _prompt_of_one_kind(value: Any) -> Any:
    """The value of ``prompt``; its first member says which kind of list it is. Raises ValueError at the first other."""
    if isinstance(value, str | dict):
        return value
    if isinstance(value, list):
        kind = type(value[0]) if value else str
        if kind in (str, int) and all_of(kind, value):
            return value
        if kind is list and all_of(list, value) and all(all_of(int, ids) for ids in value):
            return value
    raise ValueError("no prompt")


def _numbers(value: Any) -> Any:
    """An object as it is; raises ValueError at the first of its values that is no number."""
    if isinstance(value, dict) and not all(type(one) in (int, float) for one in value.values()):
        raise ValueError("not a number")
    return value


Prompts = str | list[str] | list[int] | list[list[int]] | dict[str, Any]


class Endpoint(StrEnum):
    """Where a request goes."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Form(BaseModel):
    """What all objects have in common: no key beyond those that are listed, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CacheControl(Form):
    """Marks a part of a message as worth keeping: until the room is needed, whatever ``ttl`` says."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheBreakpoint(Form):
    """OpenAI's own way to mark a part; it means the same as CacheControl."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(Form):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @property
    def marked(self) -> bool:
        return self.cache_control is not None or self.prompt_cache_breakpoint is not None


class RefusalPart(Form):
    """A part of a past answer, in which a model said no. It is text like any other."""

    type: Literal["refusal"]
    refusal: str


class CalledFunction(Form):
    """What a past answer called: a name, and arguments as the text of a JSON object."""

    name: str = Field(pattern=_NAME)
    arguments: str


class ToolCall(Form):
    """A call in a past answer."""

    id: str = Field(min_length=1, max_length=_MAX_ID)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Form):
    """A turn of a conversation. What stands in past answers beside their text is accepted where it says nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description='"system", "developer", "user", "assistant" or "tool"'
    )
    content: str | Annotated[list[TextPart | RefusalPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None, description=_CONTENT
    )
    name: str | None = Field(
        None, description="the name of who speaks, a text of at most 64 characters", min_length=1, max_length=64
    )
    refusal: str | None = Field(None, description=_TEXT)
    annotations: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = Field(
        None, description="an empty list"
    )
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None,
        description=f"a list of at most {MAX_TOOLS} calls "
        '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}',
    )
    tool_call_id: str | None = Field(
        None, description="the id of the call that this is the result of", min_length=1, max_length=_MAX_ID
    )


class Function(Form):
    """A function that a model may call. ``strict`` is accepted: arguments are enforced where a call is."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Form):
    """What a model may call."""

    type: Literal["function"] = Field(description='"function"; inlay knows no other tools')
    function: Function = Field(
        description='{"name": "…", "description": "…", "parameters": {a JSON Schema}}, its name of ' + _NAMED
    )


class FunctionName(Form):
    """A function, by name."""

    name: str


class NamedTool(Form):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


class StreamOptions(Form):
    """What a stream holds. ``continuous_usage_stats`` is vLLM's: usage so far on every chunk, beside that at the end.

    ``include_obfuscation`` asks for noise that hides lengths; there is none, ever.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JSONSchemaFormat(Form):
    """The schema of an answer. It is always enforced, whatever ``strict`` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Form):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


_Stop = Annotated[str, Field(max_length=_MAX_STOP)]


class Body(Form):
    """What both endpoints take."""

    model: str | None = Field(None, description=_TEXT)
    n: int | None = Field(None, description=_POSITIVE, ge=1)
    max_tokens: int | None = Field(None, description=_POSITIVE, ge=1)
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=LONGEST["stop"])] | None = Field(
        None,
        description=f"a text or a list of texts, at most {LONGEST['stop']}, of at most {_MAX_STOP:,} characters each",
    )
    seed: int | None = Field(None, description=f"{_WHOLE} of 64 bits", ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, description=_NUMBER)
    top_p: float | None = Field(None, description=_NUMBER)
    presence_penalty: float | None = Field(None, description=_NUMBER)
    frequency_penalty: float | None = Field(None, description=_NUMBER)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers)] | None = Field(
        None, description=f"an object of token ids and numbers, at most {LONGEST['logit_bias']:,}"
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}',
    )
    stream: bool | None = Field(None, description=_SWITCH)
    stream_options: StreamOptions | None = Field(None, description='{"include_usage": true}')
    # vLLM's
    top_k: int | None = Field(None, description=f"{_WHOLE} from -1 to {2**31 - 1}", ge=-1, lt=2**31)
    min_p: float | None = Field(None, description=_NUMBER)
    typical_p: float | None = Field(None, description=_NUMBER)
    repetition_penalty: float | None = Field(None, description=f"{_NUMBER} from 0.01 to 100", ge=0.01, le=100)
    min_tokens: int | None = Field(None, description=_WHOLE)
    ignore_eos: bool | None = Field(None, description=_SWITCH)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=LONGEST["stop_token_ids"])] | None = Field(
        None, description=f"a list of token ids, at most {LONGEST['stop_token_ids']:,}"
    )
    include_stop_str_in_output: bool | None = Field(None, description=_SWITCH)
    skip_special_tokens: bool | None = Field(None, description=_SWITCH)
    structured_outputs: dict[str, Any] | None = Field(
        None, description='{"json": schema}, {"regex": "…"} or {"choice": […]}'
    )
    priority: int | None = Field(None, description=f"{_WHOLE} of 32 bits; lower goes first", ge=-(2**31), lt=2**31)
    # inlay's own
    reuse: str | None = Field(None, description="off, exact, modular, isolated or anchored")
    positions: str | None = Field(None, description="schema or packed")
    pml: str | None = Field(None, description="a prompt as PML: <prompt schema=…>…</prompt>")


class ChatBody(Body):
    """The body of /v1/chat/completions: messages, or in their place a prompt of a schema."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = Field(
        None, description=f'a list of messages {{"role": "user", "content": "…"}}, at most {MAX_MESSAGES:,}'
    )
    prompt: dict[str, Any] | None = Field(None, description=f"a prompt of a schema: {_PROMPT}")
    max_completion_tokens: int | None = Field(None, description=_POSITIVE, ge=1)
    logprobs: bool | None = Field(None, description=_SWITCH)
    top_logprobs: int | None = Field(None, description=f"{_WHOLE} from 0 to {_MAX_LOGPROBS}", ge=0, le=_MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description=f'a list of at most {MAX_TOOLS} tools {{"type": "function", "function": {{…}}}}'
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description='"none", "auto", "required", or {"type": "function", "function": {"name": "…"}}'
    )
    parallel_tool_calls: bool | None = Field(None, description=_SWITCH)


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(_prompt_of_one_kind, json_schema_input_type=Prompts)] | None = Field(
        None,
        description=f"a text, token ids, a list of either, or a prompt of a schema: {_PROMPT}",
    )
    logprobs: int | None = Field(None, description=f"{_WHOLE} from 0 to {_MAX_LOGPROBS}", ge=0, le=_MAX_LOGPROBS)
