"""Request bodies as pydantic models: OpenAI's fields, vLLM's, and inlay's own.

An error for a wrong value quotes the description of its field. ``null`` means absent, as at OpenAI, and is removed
before these models check a body. Routes and bodies are described for the OpenAPI document at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from inlay.api import reading
from inlay.api.call import AnswerRoute
from inlay.api.foreign import IGNORED, REFUSED
from inlay.api.openai.messages import CacheOptions, Message, PastAnswer
from inlay.api.reading import (
    INTEGER,
    MARKS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
    NAME,
    NAMED,
    POSITIVE,
    STRING,
    SWITCH,
    WHOLE,
    CacheControl,
    CommonBody,
    StrictForm,
    all_are,
    described,
    of_object,
)

#: Accepted fields that clients often send and that do not change an answer.
NO_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

#: Unsupported fields → accepted neutral values, and the remedy for others.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **REFUSED,
    "audio": ((), "inlay writes text alone; leave it out"),
    "best_of": ((1,), "inlay returns every answer that it makes; ask for several with n"),
    "chat_template": ((), "a template is a program, and only the model's own is run; write chat_template_kwargs"),
    "function_call": (("auto", "none"), "it is the old form of tool_choice; write that"),
    "functions": (([],), "it is the old form of tools; write those"),
    "guided_choice": ((), 'write "structured_outputs": {"choice": […]}'),
    "guided_grammar": ((), 'write "structured_outputs": {"grammar": "…"}'),
    "guided_json": ((), 'write "structured_outputs": {"json": …}'),
    "guided_regex": ((), 'write "structured_outputs": {"regex": …}'),
    "modalities": ((["text"],), "inlay writes text alone; leave it out"),
    "moderation": ((), "inlay moderates nothing; leave it out"),
    "parallel_tool_calls": ((True, False), "only chats call tools; leave it out"),
    "prediction": ((), "inlay takes no predicted output; leave it out"),
    "spaces_between_special_tokens": ((True,), "a text is what the tokenizer's decoder gives; leave it out"),
    "suffix": (("",), "inlay does not fill gaps; leave it out"),
    "tool_choice": (("auto", "none"), "only chats call tools; leave it out"),
    "tools": (([],), "only chats call tools; send them to /v1/chat/completions"),
    "verbosity": ((), "inlay has no setting for verbosity; write it into a message"),
    "web_search_options": ((), "inlay does not search the web; leave it out"),
}

_PROMPT = '{"schema": "…", "content": […]} or {"schema": "…", "imports": […], "text": "…"}'
MAX_PROMPTS = 4_096

#: Fields that are lists or objects → the most members. Checked before the members.
LONGEST = {**reading.LONGEST, "documents": 1_024, "messages": MAX_MESSAGES, "stop": MAX_STOPS}

MAX_TAGS = 20_000  # of a prompt as PML; also values of a prompt as JSON

#: Fields with JSON Schemas or grammars → the most values in them, at any depth.
LARGEST = {
    "chat_template_kwargs": 1_000,
    "documents": 10_000,
    "response_format": 50_000,
    "structured_outputs": 50_000,
    "tools": 50_000,
}


def _prompt_of_one_kind(value: Any) -> Any:
    """Check the type of ``prompt``. The first member decides the type of a list. Raises ValueError at another type."""
    if isinstance(value, str | dict):
        return value
    if isinstance(value, list):
        kind = type(value[0]) if value else str
        if kind in (str, int) and all_are(kind, value):
            return value
        if kind is list and all_are(list, value) and all(all_are(int, ids) for ids in value):
            return value
    raise ValueError("no prompt")


Prompts = str | list[str] | list[int] | list[list[int]] | dict[str, Any]


class Endpoint(StrEnum):
    """The paths of the API."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Function(StrictForm):
    """A function that a model may call.

    ``strict`` is accepted: a grammar enforces arguments if it enforces a call. ``cache_control`` marks the tool.
    """

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class Tool(StrictForm):
    """A tool. For ``cache_control`` see Function."""

    type: Literal["function"] = Field(description='"function"; inlay knows no other tools')
    function: Function = Field(
        description='{"name": "…", "description": "…", "parameters": {a JSON Schema}}, its name of ' + NAMED
    )
    cache_control: CacheControl | None = Field(None, description=MARKS["cache_control"])


class FunctionName(StrictForm):
    """A function, by name."""

    name: str


class NamedTool(StrictForm):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class Allowed(StrictForm):
    """Some of the tools. ``mode`` says if one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(StrictForm):
    """The tools that may be called, among those that the model sees."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class StreamOptions(StrictForm):
    """Options of a stream. vLLM's ``continuous_usage_stats`` adds the usage so far to every chunk.

    ``include_obfuscation`` asks for noise that hides lengths. inlay never sends any.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JSONSchemaFormat(StrictForm):
    """The schema of an answer. It is always enforced, with any ``strict``."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictForm):
    """The form of an answer. ``structures`` and ``triggers`` are vLLM's fields for a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


_Stop = Annotated[str, Field(max_length=MAX_STOP)]


class Body(CommonBody):
    """The fields of both endpoints."""

    n: int | None = Field(None, description=POSITIVE, ge=1)
    max_tokens: int | None = Field(None, description=POSITIVE, ge=1)
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = Field(
        None,
        description=f"a text or a list of texts, at most {MAX_STOPS}, of at most {MAX_STOP:,} characters each",
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"}, '
        '{"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}, or '
        '{"type": "structural_tag", "structures": […], "triggers": […]}',
    )
    stream_options: StreamOptions | None = Field(None, description='{"include_usage": true}')
    prompt_cache_options: CacheOptions | None = Field(
        None, description='{"mode": "implicit" or "explicit", "ttl": "30m" or "12h"}'
    )
    # vLLM's
    include_stop_str_in_output: bool | None = Field(None, description=SWITCH)
    prompt_logprobs: int | None = Field(None, description=f"{WHOLE} from 0 to {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS)
    structured_outputs: dict[str, Any] | None = Field(
        None, description='{"json": schema}, {"regex": "…"}, {"choice": […]}, {"grammar": "…"} or {"structural_tag": …}'
    )
    # inlay's own
    pml: str | None = Field(None, description="a prompt as PML: <prompt schema=…>…</prompt>")


class ChatBody(Body):
    """The body of /v1/chat/completions: messages, or a prompt of a schema."""

    messages: Annotated[list[PastAnswer | Message], Field(max_length=MAX_MESSAGES)] | None = Field(
        None, description=f'a list of messages {{"role": "user", "content": "…"}}, at most {MAX_MESSAGES:,}'
    )
    prompt: dict[str, Any] | None = Field(None, description=f"a prompt of a schema: {_PROMPT}")
    max_completion_tokens: int | None = Field(None, description=POSITIVE, ge=1)
    logprobs: bool | None = Field(None, description=SWITCH)
    top_logprobs: int | None = Field(None, description=f"{WHOLE} from 0 to {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description=f'a list of at most {MAX_TOOLS} tools {{"type": "function", "function": {{…}}}}'
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = Field(
        None,
        description='"none", "auto", "required", or {"type": "function", "function": {"name": "…"}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [{"type": …}]}}',
    )
    parallel_tool_calls: bool | None = Field(None, description=SWITCH)
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object of values for variables of the chat template"
    )
    documents: Annotated[list[dict[str, str]], Field(fail_fast=True, max_length=LONGEST["documents"])] | None = Field(
        None, description=f'a list of objects of texts {{"title": "…", "text": "…"}}, at most {LONGEST["documents"]:,}'
    )
    add_generation_prompt: bool | None = Field(None, description=SWITCH)
    continue_final_message: bool | None = Field(None, description=SWITCH)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description='"none", "minimal", "low", "medium", "high", "xhigh" or "max"'
    )
    include_reasoning: bool | None = Field(None, description=SWITCH)
    echo: Literal[False] | None = Field(None, description="false; a chat's answer does not repeat its prompt")


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(_prompt_of_one_kind, json_schema_input_type=Prompts)] | None = Field(
        None,
        description=f"a text, token ids, a list of either, or a prompt of a schema: {_PROMPT}",
    )
    logprobs: int | None = Field(None, description=f"{WHOLE} from 0 to {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description=SWITCH)
    max_tokens: int | None = Field(None, description=f"{POSITIVE}, or 0 with echo or prompt_logprobs", ge=0)


ERROR = of_object(error=of_object(message=STRING, type=STRING, param={}, code={}))
_ANSWER = of_object(
    object=STRING,
    id=STRING,
    created=INTEGER,
    model=STRING,
    choices={"type": "array", "minItems": 1},
    usage=of_object(prompt_tokens=INTEGER),
    inlay=of_object(exact_tokens=INTEGER),
)

ROUTES = (
    AnswerRoute(
        Endpoint.CHAT,
        "chat_completions",
        "The next turn of a conversation, or the answer to a prompt of a schema.",
        body="ChatBody",
        error="Error",
        answer=_ANSWER,
    ),
    AnswerRoute(
        Endpoint.COMPLETIONS,
        "text_completions",
        "What comes behind a text.",
        body="CompletionBody",
        error="Error",
        answer=_ANSWER,
    ),
)


def components(names: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of both bodies, their parts, and errors.

    Args:
        names: of the served model.
    """
    return {**described([ChatBody, CompletionBody], names, no_effect=NO_EFFECT, ignored=IGNORED), "Error": ERROR}
