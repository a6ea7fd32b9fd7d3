"""Input items of the Responses API: their forms, their checks, and their turns for chat templates."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from inlay.api.failures import MAX_PROBLEMS
from inlay.api.openai.messages import MarkedText, marked_text
from inlay.api.pieces import joined
from inlay.api.reading import MARKS, MAX_ID, MAX_PARTS, TEXT, CacheControl, PartForms, Problem, StrictForm
from inlay.api.tools.readers import object_in

NAME = r"^[A-Za-z0-9_-]{1,128}$"
NAMED = "letters, digits, _ and -, at most 128 of them"

_UNUSED = "any value; it has no effect"
_NO_TOOLS = "inlay runs no tools; write its text as a message"

#: Types of items and parts that are not supported → the remedy.
REFUSED = {
    "input_image": "inlay reads text alone; leave it out, or describe it in a text",
    "input_file": "inlay reads text alone; write its text as a part of type input_text",
    "input_audio": "inlay reads text alone; write what was said",
    "item_reference": "send the item, or its response's id as previous_response_id",
    "compaction": "inlay does not shorten conversations; send the items",
    **dict.fromkeys(
        (
            "apply_patch_call",
            "apply_patch_call_output",
            "code_interpreter_call",
            "computer_call",
            "computer_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "file_search_call",
            "image_generation_call",
            "local_shell_call",
            "local_shell_call_output",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_call",
            "mcp_list_tools",
            "shell_call",
            "shell_call_output",
            "web_search_call",
        ),
        _NO_TOOLS,
    ),
}

_ENCODED = "inlay:"  # the start of reasoning that inlay has encoded
_CONTENT = 'a text, or a list of at most 1,024 parts {"type": "input_text", "text": "…"}'
_ROLES = {"developer": "system"}


class InputText(MarkedText):
    """A text to the model."""

    type: Literal["input_text"]


class OutputText(StrictForm):
    """A text of a past answer. Clients send it back with fields that have no effect."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["output_text"]
    text: str = Field(description=TEXT)


class Refusal(StrictForm):
    """A refusal of a past answer. It is treated as text."""

    type: Literal["refusal"]
    refusal: str = Field(description=TEXT)


_Part = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]
_PARTS: PartForms = {"content": {"input_text": InputText, "output_text": OutputText, "refusal": Refusal}}


class ItemForm(StrictForm):
    """The fields of every item. Clients send back ``id`` and ``status`` of past answers, without effect."""

    id: Any = Field(None, description=_UNUSED)
    status: Any = Field(None, description=_UNUSED)


class MessageItem(ItemForm):
    """A message of any role. inlay's own: a mark beside the content marks all of it, and ``order``."""

    inside: ClassVar[PartForms] = _PARTS

    type: Literal["message"] | None = Field(None, description='"message"')
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description='"user", "assistant", "system" or "developer"'
    )
    content: str | Annotated[list[_Part], Field(fail_fast=True, max_length=MAX_PARTS)] = Field(description=_CONTENT)
    phase: Any = Field(None, description=_UNUSED)
    cache_control: CacheControl | None = Field(None, description=MARKS["cache_control"])
    order: Literal["any"] | None = Field(
        None, description='"any" where marked parts of the content that are neighbours may change places'
    )


class Answered(ItemForm):
    """An item of a past answer. Clients send back answers with extra fields, so unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore")


class AnswerMessage(MessageItem, Answered):
    """A message of a past answer."""

    role: Literal["assistant"] = Field(description='"assistant"')


class FunctionCall(Answered):
    """A call in a past answer."""

    type: Literal["function_call"]
    call_id: str = Field(description=TEXT, min_length=1, max_length=MAX_ID)
    name: str = Field(description=f"the name of a function, of {NAMED}", pattern=NAME)
    arguments: str = Field(description="the arguments as JSON text")
    namespace: str | None = Field(None, description=f"the name of a namespace, of {NAMED}", pattern=NAME)


class FunctionCallOutput(ItemForm):
    """The result of a call."""

    inside: ClassVar[PartForms] = {"output": {"input_text": InputText}}

    type: Literal["function_call_output"]
    call_id: str = Field(description="the id of the call that this is the result of", min_length=1, max_length=MAX_ID)
    output: str | Annotated[list[InputText], Field(fail_fast=True, max_length=MAX_PARTS)] = Field(
        description='a text, or a list of parts {"type": "input_text", "text": "…"}'
    )
    caller: Any = Field(None, description=_UNUSED)
    name: Any = Field(None, description=_UNUSED)
    namespace: Any = Field(None, description=_UNUSED)
    cache_control: CacheControl | None = Field(None, description=MARKS["cache_control"])


class ReasoningText(StrictForm):
    """A text of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str = Field(description=TEXT)


class ReasoningItem(Answered):
    """The reasoning of a past answer. The model sees its content, else its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None, description='a list of parts {"type": "summary_text", "text": "…"}'
    )
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None, description='a list of parts {"type": "reasoning_text", "text": "…"}'
    )
    encrypted_content: str | None = Field(None, description=TEXT)

    @property
    def text(self) -> str:
        parts = self.content or ()
        encoded = "" if parts else decoded_reasoning(self.encrypted_content or "")
        return encoded or "".join(part.text for part in parts or self.summary or ())


AnyItem = MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem

FORMS: Mapping[str, type[ItemForm]] = {
    "message": MessageItem,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}


def form_of(item: Any) -> type[ItemForm] | None:
    """Return the class of an item by its type; None for an unknown type."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else "message"
    if kind == "message" and isinstance(item, Mapping) and item.get("role") == "assistant":
        return AnswerMessage
    return FORMS.get(kind) if isinstance(kind, str) else None


def encoded_reasoning(text: str) -> str:
    """Return reasoning in a form that clients keep and send back. It is not secret: only clients look for a key."""
    return _ENCODED + base64.b64encode(text.encode(errors="surrogatepass")).decode()


def decoded_reasoning(encoded: str) -> str:
    """Return reasoning from ``encoded_reasoning``; "" for that of another server."""
    if not encoded.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(encoded.removeprefix(_ENCODED), validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ""


def problems_of(items: Sequence[AnyItem], calls: set[str]) -> list[Problem]:
    """Return results without their calls, up to the limit of one error. ``calls`` are the ids of stored calls."""
    problems: list[Problem] = []
    for number, item in enumerate(items):
        if isinstance(item, FunctionCall):
            calls.add(item.call_id)
        if isinstance(item, FunctionCallOutput) and item.call_id not in calls and len(problems) <= MAX_PROBLEMS:
            param = f"input[{number}].call_id"
            said = f"{param} is {item.call_id!r:.60}, and no item before it calls that; send the call too"
            problems.append((param, "invalid_value", said))
    return problems


def first_of_tools(items: Sequence[AnyItem]) -> int | None:
    """Return the number of the first call or result."""
    kinds = (FunctionCall, FunctionCallOutput)
    return next((number for number, item in enumerate(items) if isinstance(item, kinds)), None)


def turns_of(instructions: str | None, items: Sequence[AnyItem], ttl: str | None) -> list[dict[str, Any]]:
    """Return a conversation in the form of chat templates. Raises BodyError.

    The reasoning, the text and the calls of one answer become one turn. Neighbouring messages of one role become one.

    Args:
        instructions: the system prompt.
        items: the checked items.
        ttl: for OpenAI's marks without a ttl.
    """
    turns = [{"role": "system", "content": instructions}] if instructions else []
    names = {item.call_id: full_name(item) for item in items if isinstance(item, FunctionCall)}
    answer: dict[str, Any] | None = None  # the turn of the current answer
    for number, item in enumerate(items):
        if isinstance(item, FunctionCallOutput) or (isinstance(item, MessageItem) and item.role != "assistant"):
            answer = None
            turns.append(_given(item, f"input[{number}]", ttl, names))
            continue
        if answer is None or (isinstance(item, MessageItem | ReasoningItem) and "tool_calls" in answer):
            answer = {"role": "assistant", "content": ""}
            turns.append(answer)
        _add(item, answer, f"input[{number}]", ttl)
    return joined(turn for turn in turns if turn["role"] != "assistant" or len(turn) > 2 or turn["content"])


def full_name(call: FunctionCall) -> str:
    """Return the name that the model reads: with the namespace in front, if there is one."""
    return call.name if call.namespace is None else f"{call.namespace}.{call.name}"


def _given(
    item: MessageItem | FunctionCallOutput, place: str, ttl: str | None, names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the turn of a message to the model, or of a result."""
    turn: dict[str, Any]
    if isinstance(item, FunctionCallOutput):
        content = _content(item.output, f"{place}.output", ttl)
        turn = {"role": "tool", "content": content, "tool_call_id": item.call_id, "name": names[item.call_id]}
    else:
        content = _content(item.content, f"{place}.content", ttl)
        turn = {"role": _ROLES.get(item.role, item.role), "content": content}
        turn |= {} if item.order is None else {"order": item.order}
    if item.cache_control is not None and content:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        turn["content"] = [*parts[:-1], {"cache_control": item.cache_control.mark, **parts[-1]}]
    return turn


def _add(item: AnyItem, answer: dict[str, Any], place: str, ttl: str | None) -> None:
    """Add an item to the turn of its answer."""
    if isinstance(item, ReasoningItem):
        if item.text:
            answer["reasoning_content"] = "\n".join(filter(None, (answer.get("reasoning_content"), item.text)))
    elif isinstance(item, FunctionCall):
        arguments = object_in(item.arguments)
        function = {"name": full_name(item), "arguments": item.arguments if arguments is None else arguments}
        answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, MessageItem):
        content = _content(item.content, f"{place}.content", ttl)
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        answer["content"] += text


def _content(content: str | Sequence[Any], place: str, ttl: str | None) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{place}[{number}]", ttl) for number, part in enumerate(content)]


def _part(part: InputText | OutputText | Refusal, place: str, ttl: str | None) -> dict[str, Any]:
    if isinstance(part, InputText):
        return marked_text(part, ttl, place)
    return {"type": "text", "text": part.text if isinstance(part, OutputText) else part.refusal}
