"""Chat messages: their fields, their checks, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from inlay.api.failures import MAX_PROBLEMS, BodyError
from inlay.api.reading import (
    MARKS,
    MAX_ID,
    MAX_PARTS,
    MAX_TOOLS,
    NAME,
    TEXT,
    CacheControl,
    PartForms,
    Problem,
    StrictForm,
)
from inlay.api.tools.readers import object_in

_CONTENT = (
    'a text, or a list of parts {"type": "text", "text": "…"}, each with or without '
    '"cache_control": {"type": "ephemeral"}; inlay reads text alone, in at most 1,024 parts'
)
_ROLES = {"developer": "system"}  # OpenAI's newer name for the same turn


class CacheBreakpoint(StrictForm):
    """OpenAI's mark for a part, with the meaning of CacheControl. Without ``ttl``, the request's applies."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(StrictForm):
    """OpenAI's options for the text that a request leaves in the cache.

    Args:
        mode: "implicit" also keeps text after the last marked part. "explicit" keeps text up to that part only, and
            nothing without marks.
        ttl: for marked parts without a ttl.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class MarkedText(StrictForm):
    """A text that may have a mark."""

    type: str
    text: str = Field(description=TEXT)
    cache_control: CacheControl | None = Field(None, description=MARKS["cache_control"])
    prompt_cache_breakpoint: CacheBreakpoint | None = Field(None, description=MARKS["prompt_cache_breakpoint"])

    @property
    def marked(self) -> bool:
        return self.cache_control is not None or self.prompt_cache_breakpoint is not None


class TextPart(MarkedText):
    """A part of a message's content."""

    type: Literal["text"]


class RefusalPart(StrictForm):
    """A part of a past answer that refuses. It is treated as text."""

    type: Literal["refusal"]
    refusal: str = Field(description=TEXT)


class Echo(StrictForm):
    """A part of a past answer. Clients send back answers with extra fields, so unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore")


class EchoedPart(StrictForm):
    """Fields that clients keep in a part of a past answer. They have no effect."""

    annotations: Any = None
    citations: Any = None
    extras: Any = None
    id: Any = None
    index: Any = None
    logprobs: Any = None
    provider_specific_fields: Any = None


class EchoedText(EchoedPart, TextPart):
    """A text of a past answer."""


class EchoedRefusal(EchoedPart, RefusalPart):
    """A refusal of a past answer."""


_EchoedParts = Annotated[list[EchoedText | EchoedRefusal], Field(fail_fast=True, max_length=MAX_PARTS)]


class CalledFunction(Echo):
    """The function of a past call: a name, and its arguments as any text."""

    name: str = Field(pattern=NAME)
    arguments: str


class ToolCall(Echo):
    """A call in a past answer."""

    id: str = Field(min_length=1, max_length=MAX_ID)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(StrictForm):
    """A turn of a conversation."""

    inside: ClassVar[PartForms] = {"content": {"text": TextPart, "refusal": RefusalPart}}

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description='"system", "developer", "user", "assistant" or "tool"'
    )
    content: str | Annotated[list[TextPart | RefusalPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None, description=_CONTENT
    )
    name: str | None = Field(
        None, description="the name of who speaks, a text of at most 64 characters", min_length=1, max_length=64
    )
    refusal: str | None = Field(None, description=TEXT)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None,
        description=f"a list of at most {MAX_TOOLS} calls "
        '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}',
    )
    tool_call_id: str | None = Field(
        None, description="the id of the call that this is the result of", min_length=1, max_length=MAX_ID
    )
    cache_control: CacheControl | None = Field(None, description=MARKS["cache_control"])
    # inlay's own
    order: Literal["any"] | None = Field(
        None, description='"any" where marked parts of the content that are neighbours may change places'
    )


class PastAnswer(Message, Echo):
    """A turn of the model, as a client stored it. Fields beside its text, reasoning and calls are ignored.

    ``function_call`` is refused, because the model would not see that call.
    """

    inside: ClassVar[PartForms] = {"content": {"text": EchoedText, "refusal": EchoedRefusal}}

    role: Literal["assistant"] = Field(description='"assistant"')
    content: str | _EchoedParts | None = Field(None, description=_CONTENT)  # type: ignore[assignment]
    reasoning_content: str | None = Field(None, description=TEXT)
    reasoning: str | None = Field(None, description=TEXT)
    function_call: None = Field(None, description="left out; it is the old form of tool_calls, so write those")


def form_of(message: Any) -> type[Message]:
    """Return the class of a message."""
    past = isinstance(message, Mapping) and message.get("role") == "assistant"
    return PastAnswer if past else Message


def problems_of(messages: Sequence[Message]) -> list[Problem]:
    """Return the problems of messages that are each well-formed: missing fields, and results without calls.

    At most MAX_PROBLEMS problems are returned.
    """
    problems: list[Problem] = []
    calls: set[str] = set()
    for number, message in enumerate(messages):
        if len(problems) > MAX_PROBLEMS:
            break
        place = f"messages[{number}]"
        for field, sentence in _against_role(message, calls):
            problems.append((f"{place}.{field}", "invalid_value", f"{place} {sentence}"))
        calls.update(call.id for call in message.tool_calls or ())
    return problems


def _against_role(message: Message, calls: set[str]) -> list[tuple[str, str]]:
    """Return missing fields of a message and fields that its role forbids. ``calls`` are the ids of earlier calls."""
    wrong = []
    past_answer = message.role == "assistant"
    if message.content is None and not (past_answer and _says_more(message)):
        wrong.append(("content", f"has no content; it must be {Message.model_fields['content'].description}"))
    if message.tool_calls and not past_answer:
        wrong.append(("tool_calls", f"has tool_calls, and its role is {message.role!r}; only an assistant calls tools"))
    if message.refusal is not None and (not past_answer or message.content):
        wrong.append(("refusal", "has a refusal; only an assistant has one, in place of content"))
    if message.role != "tool":
        if message.tool_call_id is not None:
            wrong.append(("tool_call_id", 'has a tool_call_id; only a message of role "tool" has one'))
    elif message.tool_call_id is None:
        wrong.append(("tool_call_id", "has no tool_call_id; it must be the id of the call that it is the result of"))
    elif message.tool_call_id not in calls:
        call = f"{message.tool_call_id!r:.60}"
        wrong.append(("tool_call_id", f"is the result of {call}, which no message before it calls; send that one too"))
    return wrong


def _says_more(message: Message) -> bool:
    """True if a past answer needs no content, because it has tool calls, reasoning or a refusal."""
    thought = isinstance(message, PastAnswer) and (message.reasoning_content or message.reasoning)
    return bool(message.tool_calls or thought) or message.refusal is not None


def for_template(messages: Sequence[Message], ttl: str | None = None) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates. Content in parts stays in parts. Raises BodyError.

    The name of the function is added to tool results, because some templates need it.

    Args:
        messages: the checked messages.
        ttl: for OpenAI's marks without a ttl.
    """
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    made = []
    for number, message in enumerate(messages):
        content = _content(message, ttl, f"messages[{number}].content")
        turn: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": content}
        name = message.name or names.get(message.tool_call_id or "")
        if name is not None:
            turn["name"] = name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if isinstance(message, PastAnswer):
            thoughts = {"reasoning_content": message.reasoning_content, "reasoning": message.reasoning}
            turn |= {name: text for name, text in thoughts.items() if text is not None}
        if message.cache_control is not None:
            turn["cache_control"] = message.cache_control.model_dump(exclude_none=True)
        if message.order is not None:
            turn["order"] = message.order
        if message.tool_calls:
            turn["tool_calls"] = _calls(message)
        made.append(turn)
    return made


def first_of_tools(messages: Sequence[Message]) -> int | None:
    """Return the number of the first message with a tool call or a tool result."""
    return next((number for number, one in enumerate(messages) if one.tool_calls or one.role == "tool"), None)


def _content(message: Message, ttl: str | None, place: str) -> str | list[dict[str, Any]]:
    if isinstance(message.content, list):
        return [_part(part, ttl, f"{place}[{number}]") for number, part in enumerate(message.content)]
    return message.content or message.refusal or ""


def _part(part: TextPart | RefusalPart, ttl: str | None, place: str) -> dict[str, Any]:
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    return marked_text(part, ttl, place)


def marked_text(part: MarkedText, ttl: str | None, place: str) -> dict[str, Any]:
    """Return a part in the form of prompts. OpenAI's and Anthropic's marks become one form. Raises BodyError.

    Args:
        part: the part.
        ttl: for OpenAI's marks without a ttl.
        place: the path to the part.
    """
    if not part.marked:
        return {"type": "text", "text": part.text}
    marks = (part.cache_control, part.prompt_cache_breakpoint)
    ttls = [mark.ttl for mark in marks if mark is not None and mark.ttl is not None]
    if len(set(ttls)) > 1:
        message = f"{place} has the lifetimes {ttls[0]!r} and {ttls[1]!r} in its two marks; leave one of them out"
        raise BodyError(message, param=place)
    if ttl is not None and part.prompt_cache_breakpoint is not None:
        ttls.append(ttl)
    said = {"ttl": ttls[0]} if ttls else {}
    return {"type": "text", "text": part.text, "cache_control": {"type": "ephemeral"} | said}


def _calls(message: Message) -> list[dict[str, Any]]:
    """Return calls with their arguments as objects, because templates format the JSON themselves.

    Arguments that are no object, like those of a truncated call, stay text.
    """
    made = []
    for call in message.tool_calls or ():
        arguments = object_in(call.function.arguments)
        said = call.function.arguments if arguments is None else arguments
        function = {"name": call.function.name, "arguments": said}
        made.append({"id": call.id, "type": "function", "function": function})
    return made
