"""Messages of the Messages API: their content blocks, their checks, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inlay.api.failures import MAX_PROBLEMS
from inlay.api.pieces import joined, parts_of
from inlay.api.reading import MARKS, MAX_ID, MAX_PARTS, SWITCH, TEXT, CacheControl, PartForms, Problem, StrictForm

NAME = r"^[A-Za-z0-9_.-]{1,128}$"
NAMED = "letters, digits, _, . and -, at most 128 of them"

_MARK = MARKS["cache_control"]
_UNUSED = "any value; it has no effect"

#: The start of a system block that Claude Code writes for Anthropic's accounts. It changes with every conversation, and
#: the model is not meant to read it.
_BILLING = "x-anthropic-billing-header:"

#: Types of blocks and sources that are not supported → the remedy.
REFUSED = {
    "image": "inlay reads text alone; leave it out, or describe it in a text block",
    "search_result": "inlay has no form for search results; write its text as a text block",
    "container_upload": "inlay has no containers; leave it out",
    "server_tool_use": "inlay runs no tools; leave it out",
    "web_search_tool_result": "inlay runs no tools; write its text as a text block",
    "web_fetch_tool_result": "inlay runs no tools; write its text as a text block",
    "code_execution_tool_result": "inlay runs no tools; write its text as a text block",
    "bash_code_execution_tool_result": "inlay runs no tools; write its text as a text block",
    "text_editor_code_execution_tool_result": "inlay runs no tools; write its text as a text block",
    "tool_search_tool_result": "inlay runs no tools; leave it out",
    "tool_reference": "inlay shows all tools to the model; leave it out",
    "base64": 'inlay reads text alone; write {"type": "text", "media_type": "text/plain", "data": "…"}',
    "url": 'inlay fetches nothing; write {"type": "text", "media_type": "text/plain", "data": "…"}',
    "file": 'inlay stores no files; write {"type": "text", "media_type": "text/plain", "data": "…"}',
}


class Citations(StrictForm):
    """The citations of a document. inlay makes none."""

    enabled: Literal[False] | None = None


class TextBlock(StrictForm):
    """A text. Clients send back ``citations`` of past answers, which have no effect."""

    type: Literal["text"]
    text: str = Field(description=TEXT)
    cache_control: CacheControl | None = Field(None, description=_MARK)
    citations: Any = Field(None, description=_UNUSED)

    @property
    def shown(self) -> str:
        return self.text


class TextSource(StrictForm):
    """A document's text."""

    type: Literal["text"]
    data: str = Field(description=TEXT)
    media_type: Literal["text/plain"] | None = Field(None, description='"text/plain"')


class ContentSource(StrictForm):
    """A document's text, in blocks."""

    inside: ClassVar[PartForms] = {"content": {"text": TextBlock}}

    type: Literal["content"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS)] = Field(
        description="a text, or a list of text blocks"
    )

    @property
    def data(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(block.text for block in self.content)


class DocumentBlock(StrictForm):
    """A document. The model reads its title, its context and its text, a line for each of the first two."""

    inside: ClassVar[PartForms] = {"source": {"text": TextSource, "content": ContentSource}}

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")] = Field(
        description='{"type": "text", "media_type": "text/plain", "data": "…"}'
    )
    title: str | None = Field(None, description=TEXT)
    context: str | None = Field(None, description=TEXT)
    citations: Citations | None = Field(None, description='{"enabled": false}; inlay cites nothing')
    cache_control: CacheControl | None = Field(None, description=_MARK)

    @property
    def shown(self) -> str:
        return "\n".join(text for text in (self.title, self.context, self.source.data) if text)


class ThinkingBlock(StrictForm):
    """The reasoning of a past answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str = Field(description=TEXT)
    signature: str | None = Field(None, description=TEXT)


class RedactedThinkingBlock(StrictForm):
    """Reasoning of another server, which only that server can read. The model does not see it."""

    type: Literal["redacted_thinking"]
    data: str = Field(description=TEXT)


class ToolUseBlock(StrictForm):
    """A call in a past answer."""

    type: Literal["tool_use"]
    id: str = Field(description=TEXT, min_length=1, max_length=MAX_ID)
    name: str = Field(description=f"the name of a tool, of {NAMED}", pattern=NAME)
    input: dict[str, Any] = Field(description="an object: the arguments of the call")
    cache_control: CacheControl | None = Field(None, description=_MARK)
    caller: Any = Field(None, description=_UNUSED)
    toolset_name: None = Field(None, description="left out; inlay has no toolsets")


_ResultBlock = Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(StrictForm):
    """The result of a call. ``is_error`` reaches the template, and most templates show the content alone."""

    inside: ClassVar[PartForms] = {"content": {"text": TextBlock, "document": DocumentBlock}}

    type: Literal["tool_result"]
    tool_use_id: str = Field(
        description="the id of the call that this is the result of", min_length=1, max_length=MAX_ID
    )
    content: str | Annotated[list[_ResultBlock], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None, description="a text, or a list of text blocks and documents"
    )
    is_error: bool | None = Field(None, description=SWITCH)
    cache_control: CacheControl | None = Field(None, description=_MARK)


_CONTENT = 'a text, or a list of at most 1,024 blocks {"type": "text", "text": "…"}'
_UserBlock = Annotated[TextBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]
_PastBlock = Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class Message(StrictForm):
    """A turn of a conversation. inlay's own: a mark beside the content marks all of it, and ``order``."""

    cache_control: CacheControl | None = Field(None, description=_MARK)
    order: Literal["any"] | None = Field(
        None, description='"any" where marked blocks of the content that are neighbours may change places'
    )


class UserMessage(Message):
    """A turn of the user: texts, documents, and results of calls."""

    inside: ClassVar[PartForms] = {
        "content": {"text": TextBlock, "document": DocumentBlock, "tool_result": ToolResultBlock}
    }

    role: Literal["user"] = Field(description='"user", "assistant" or "system"')
    content: str | Annotated[list[_UserBlock], Field(fail_fast=True, max_length=MAX_PARTS)] = Field(
        description=_CONTENT
    )


class AssistantMessage(Message):
    """A past answer: texts, reasoning and calls. The last message may be the start of the answer."""

    inside: ClassVar[PartForms] = {
        "content": {
            "text": TextBlock,
            "thinking": ThinkingBlock,
            "redacted_thinking": RedactedThinkingBlock,
            "tool_use": ToolUseBlock,
        }
    }

    role: Literal["assistant"] = Field(description='"user", "assistant" or "system"')
    content: str | Annotated[list[_PastBlock], Field(fail_fast=True, max_length=MAX_PARTS)] = Field(
        description=_CONTENT
    )


class SystemMessage(Message):
    """Instructions in the middle of a conversation."""

    inside: ClassVar[PartForms] = {"content": {"text": TextBlock}}

    role: Literal["system"] = Field(description='"user", "assistant" or "system"')
    content: str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS)] = Field(description=_CONTENT)


AnyMessage = UserMessage | AssistantMessage | SystemMessage

_FORMS: dict[Any, type[Message]] = {"assistant": AssistantMessage, "system": SystemMessage}


def form_of(message: Any) -> type[Message]:
    """Return the class of a message, by its role."""
    role = message.get("role") if isinstance(message, Mapping) else None
    return _FORMS.get(role if isinstance(role, str) else None, UserMessage)


def problems_of(messages: Sequence[AnyMessage]) -> list[Problem]:
    """Return the problems of messages: tool results without their calls, and messages without content.

    At most MAX_PROBLEMS problems are returned.
    """
    problems: list[Problem] = []
    calls: set[str] = set()
    for number, message in enumerate(messages):
        if len(problems) > MAX_PROBLEMS:
            break
        place = f"messages[{number}].content"
        if not message.content and not isinstance(message, AssistantMessage):
            problems.append((place, "invalid_value", f"{place} is empty; it must be {_CONTENT}"))
        for at, block in enumerate(_blocks(message)):
            if isinstance(block, ToolUseBlock):
                calls.add(block.id)
            if isinstance(block, ToolResultBlock) and block.tool_use_id not in calls:
                param = f"{place}[{at}].tool_use_id"
                said = f"{param} is {block.tool_use_id!r:.60}, and no message before it calls that; send the call too"
                problems.append((param, "invalid_value", said))
    return problems


def first_of_tools(messages: Sequence[AnyMessage]) -> int | None:
    """Return the number of the first message with a tool call or a tool result."""
    kinds = (ToolUseBlock, ToolResultBlock)
    found = (number for number, one in enumerate(messages) if any(isinstance(block, kinds) for block in _blocks(one)))
    return next(found, None)


def turns_of(
    system: str | Sequence[TextBlock] | None, messages: Sequence[AnyMessage], mark: CacheControl | None = None
) -> list[dict[str, Any]]:
    """Return a conversation in the form of chat templates.

    Results of calls become turns of their own, with the name of the function, because some templates need it.
    Neighbouring turns of one role become one, as at Anthropic.

    Args:
        system: the system prompt.
        messages: the checked messages.
        mark: the request's own ``cache_control``, for its last text.
    """
    turns: list[dict[str, Any]] = []
    if isinstance(system, str):
        turns += [{"role": "system", "content": system}] if system else []
    elif parts := [_part(block, None) for block in system or () if not block.text.startswith(_BILLING)]:
        turns.append({"role": "system", "content": parts})
    names = {
        block.id: block.name for message in messages for block in _blocks(message) if isinstance(block, ToolUseBlock)
    }
    for message in messages:
        turns += _assistant(message) if isinstance(message, AssistantMessage) else _given(message, names)
    turns = joined(turns)
    if mark is not None:
        _mark_last(turns, mark)
    return turns


def _blocks(message: AnyMessage) -> Sequence[Any]:
    return () if isinstance(message.content, str) else message.content


def _given(message: UserMessage | SystemMessage, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the turns of a message to the model."""
    options = {} if message.order is None else {"order": message.order}
    if isinstance(message.content, str):
        yield {"role": message.role, "content": _text(message.content, message.cache_control), **options}
        return
    parts: list[dict[str, Any]] = []
    for block in message.content:
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block, message.cache_control))
            continue
        if parts:
            yield {"role": message.role, "content": parts, **options}
            parts = []
        yield _result(block, names, message.cache_control)
    if parts:
        yield {"role": message.role, "content": parts, **options}


def _result(block: ToolResultBlock, names: Mapping[str, str], mark: CacheControl | None) -> dict[str, Any]:
    mark = block.cache_control or mark
    if block.content is None or isinstance(block.content, str):
        content = _text(block.content or "", mark)
    else:
        content = [_part(one, mark) for one in block.content]
    turn = {"role": "tool", "content": content, "tool_call_id": block.tool_use_id, "name": names[block.tool_use_id]}
    return turn | ({"is_error": True} if block.is_error else {})


def _assistant(message: AssistantMessage) -> Iterator[dict[str, Any]]:
    """Yield the turn of a past answer. An answer without text, reasoning and calls has none."""
    blocks: Sequence[StrictForm] = _blocks(message)
    if isinstance(message.content, str):
        blocks = [TextBlock.model_validate({"type": "text", "text": message.content})]
    parts = [_part(block, message.cache_control) for block in blocks if isinstance(block, TextBlock) and block.text]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if not (parts or thoughts or calls):
        return
    marked = any("cache_control" in part for part in parts)
    turn: dict[str, Any] = {"role": "assistant"}
    turn["content"] = parts if marked else "".join(part["text"] for part in parts)
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    yield turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _part(block: TextBlock | DocumentBlock, mark: CacheControl | None) -> dict[str, Any]:
    mark = block.cache_control or mark
    part: dict[str, Any] = {"type": "text", "text": block.shown}
    return part if mark is None or not part["text"] else {**part, "cache_control": mark.mark}


def _text(text: str, mark: CacheControl | None) -> str | list[dict[str, Any]]:
    if mark is None or not text:
        return text
    return [{"type": "text", "text": text, "cache_control": mark.mark}]


def _mark_last(turns: list[dict[str, Any]], mark: CacheControl) -> None:
    """Mark the last text of a conversation, if it has no mark."""
    for turn in reversed(turns):
        parts = [part for part in parts_of(turn["content"]) if part["text"]]
        if parts:
            parts[-1] = {"cache_control": mark.mark, **parts[-1]}
            turn["content"] = parts
            return
