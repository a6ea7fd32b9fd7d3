"""The bodies of requests as pydantic models: OpenAI's fields, those that vLLM adds, and inlay's own.

A field's description is what a sentence about a wrong value says that it must be. ``null`` is the same as leaving a
field out, as at OpenAI; it never gets here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_MAX_LOGPROBS = 20

#: Fields that clients send by habit, and that change nothing about an answer: accepted, and never looked at.
NO_EFFECT = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
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
    "function_call": (("auto", "none"), "inlay calls no functions; leave it out, or ask for JSON with response_format"),
    "functions": (([],), "inlay calls no functions; leave it out, or ask for JSON with response_format"),
    "guided_choice": ((), 'write "structured_outputs": {"choice": […]}'),
    "guided_json": ((), 'write "structured_outputs": {"json": …}'),
    "guided_regex": ((), 'write "structured_outputs": {"regex": …}'),
    "modalities": ((["text"],), "inlay writes text alone; leave it out"),
    "moderation": ((), "inlay moderates nothing; leave it out"),
    "prediction": ((), "inlay takes no predicted output; leave it out"),
    "reasoning_effort": ((), "inlay has no setting for reasoning; write it into a message"),
    "stream_options": (({},), "it is about streams; leave it out"),
    "suffix": (("",), "inlay does not fill gaps; leave it out"),
    "tool_choice": (("auto", "none"), "inlay calls no tools; leave it out, or ask for JSON with response_format"),
    "tools": (([],), "inlay calls no tools; leave it out, or ask for JSON with response_format"),
    "verbosity": ((), "inlay has no setting for verbosity; write it into a message"),
    "web_search_options": ((), "inlay does not search the web; leave it out"),
}

_WHOLE = "a whole number"
_NUMBER = "a number"
_SWITCH = "true or false"
_TEXT = "a text"
_POSITIVE = "a whole number of at least 1"
_CONTENT = 'a text, or a list of parts {"type": "text", "text": "…"}; inlay reads text alone'


class Endpoint(StrEnum):
    """Where a request goes."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Form(BaseModel):
    """What all objects have in common: no key beyond those that are listed, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(Form):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Form):
    """A turn of a conversation. What stands in past answers beside their text is accepted where it says nothing."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description='"system", "developer", "user" or "assistant"'
    )
    content: str | list[TextPart] = Field(description=_CONTENT)
    annotations: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="an empty list")
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="an empty list; inlay calls no tools"
    )

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


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


class Body(Form):
    """What both endpoints take."""

    model: str | None = Field(None, description=_TEXT)
    n: int | None = Field(None, description=_POSITIVE, ge=1)
    max_tokens: int | None = Field(None, description=_POSITIVE, ge=1)
    stop: str | list[str] | None = Field(None, description="a text or a list of texts")
    seed: int | None = Field(None, description=f"{_WHOLE} of 64 bits", ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, description=_NUMBER)
    top_p: float | None = Field(None, description=_NUMBER)
    presence_penalty: float | None = Field(None, description=_NUMBER)
    frequency_penalty: float | None = Field(None, description=_NUMBER)
    logit_bias: dict[str, float] | None = Field(None, description="an object of token ids and numbers")
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}',
    )
    stream: bool | None = Field(None, description=_SWITCH)
    # vLLM's
    top_k: int | None = Field(None, description=_WHOLE)
    min_p: float | None = Field(None, description=_NUMBER)
    typical_p: float | None = Field(None, description=_NUMBER)
    repetition_penalty: float | None = Field(None, description=_NUMBER)
    min_tokens: int | None = Field(None, description=_WHOLE)
    ignore_eos: bool | None = Field(None, description=_SWITCH)
    stop_token_ids: list[int] | None = Field(None, description="a list of token ids")
    include_stop_str_in_output: bool | None = Field(None, description=_SWITCH)
    skip_special_tokens: bool | None = Field(None, description=_SWITCH)
    structured_outputs: dict[str, Any] | None = Field(
        None, description='{"json": schema}, {"regex": "…"} or {"choice": […]}'
    )
    # inlay's own
    reuse: str | None = Field(None, description="off, exact, isolated or anchored")
    positions: str | None = Field(None, description="schema or packed")
    pml: str | None = Field(None, description="a prompt as PML: <prompt schema=…>…</prompt>")


class ChatBody(Body):
    """The body of /v1/chat/completions: messages, or in their place a prompt of a schema."""

    messages: list[Message] | None = Field(None, description='a list of messages {"role": "user", "content": "…"}')
    prompt: dict[str, Any] | None = Field(None, description='a prompt of a schema: {"schema": "…", "content": […]}')
    max_completion_tokens: int | None = Field(None, description=_POSITIVE, ge=1)
    logprobs: bool | None = Field(None, description=_SWITCH)
    top_logprobs: int | None = Field(None, description=f"{_WHOLE} from 0 to {_MAX_LOGPROBS}", ge=0, le=_MAX_LOGPROBS)


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] | dict[str, Any] | None = Field(
        None,
        description='a text, token ids, a list of either, or a prompt of a schema: {"schema": "…", "content": […]}',
    )
    logprobs: int | None = Field(None, description=f"{_WHOLE} from 0 to {_MAX_LOGPROBS}", ge=0, le=_MAX_LOGPROBS)
