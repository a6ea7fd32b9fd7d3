"""Request bodies as pydantic models (OpenAI's fields, vLLM's, and inlay's own), their rules, and their translation into
a call.

An error for a wrong value quotes the description of its field. ``null`` means absent, as at OpenAI, and is removed
before these models check a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Unpack, cast

from pydantic import Field, PlainValidator

from inlay.api import reading
from inlay.api.call import AnswerRoute, Call, OfModel
from inlay.api.failures import BodyError
from inlay.api.foreign import IGNORED, REFUSED
from inlay.api.openai.messages import (
    CacheOptions,
    Message,
    PastAnswer,
    first_of_tools,
    for_template,
    form_of,
    problems_of,
)
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
    BodyRules,
    CacheControl,
    CommonBody,
    Members,
    StrictForm,
    all_are,
    all_of,
    check_values,
    described,
    of_object,
    read_fields,
)
from inlay.api.reasoning import ModelReasoning, ReasoningUse, variables_for
from inlay.api.sampling import answer_schema, bounded_schema, call_of, chat_prompt, field_of
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.offer import Offer, OfferChoice, OfferedFunction, check_history, offer_tools, with_family_ids
from inlay.errors import ParameterError
from inlay.pml import Prompt
from inlay.prompt.inputs import CHAT_OPTIONS, PromptInput, unwrap
from inlay.wording import shown

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
    "cache_salt": ((), "the key of the request determines its cache; leave it out, and give each tenant a key"),
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

    example: ClassVar[str] = '{"messages": […]}'

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

    example: ClassVar[str] = '{"prompt": "…"}'

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


RULES = BodyRules(
    forms={Endpoint.CHAT: ChatBody, Endpoint.COMPLETIONS: CompletionBody},
    no_effect=NO_EFFECT,
    ignored=IGNORED,
    unsupported=UNSUPPORTED,
    longest=LONGEST,
    largest=LARGEST,
    members={
        "messages": Members(form_of, "message", 'a message {"role": "user", "content": "…"}'),
        "tools": Members(lambda _: Tool, "tool", 'a tool {"type": "function", "function": {…}}'),
    },
    kinds={
        "messages": {"content": "part", "tool_calls": "call", "cache_control": "mark"},
        "part": {"cache_control": "mark", "prompt_cache_breakpoint": "mark"},
        "mark": {},
        "call": {"function": "function"},
        "tools": {"function": "function", "cache_control": "mark"},
        "tool_choice": {"function": "function", "allowed_tools": "allowed"},
        "allowed": {"tools": "tools"},
        "function": {"cache_control": "mark"},
        "response_format": {"json_schema": "json_schema"},
        "json_schema": {},
        "stream_options": {},
        "prompt_cache_options": {},
    },
)


def read_body(raw: Any, endpoint: str) -> Body:
    """Check a request and return its body, without the fields that have no effect.

    Raises BodyError, which names up to MAX_PROBLEMS problems.
    """
    prompt = raw.get("prompt") if isinstance(raw, Mapping) else None
    if isinstance(prompt, Mapping):
        check_values("prompt", prompt, MAX_TAGS)
    many = isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int)
    body, problems = read_fields({**raw, "prompt": None} if many else raw, endpoint, RULES)
    if many:
        sentence = f"prompt is {shown(prompt)}; one request takes at most {MAX_PROMPTS:,} prompts"
        problems.append(("prompt", "invalid_value", sentence))
    if isinstance(body, ChatBody) and not problems:
        problems += problems_of(body.messages or ())
    if problems or body is None:
        raise all_of(problems)
    assert isinstance(body, Body), "the rules have no other form"
    return body


_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; only the context limits a chat's answer


def translate(body: Body, **model: Unpack[OfModel]) -> Call:
    """Translate a body into a call.

    Without max_tokens, a completion has 16 and a chat the rest of the context. The model's default max_tokens applies
    to chats only.

    Raises:
        BodyError: the body is inconsistent.
        PMLError: a prompt of a schema cannot be parsed.
    """
    tools, reasoning, defaults = model.get("tools"), model.get("reasoning"), model.get("defaults", {})
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    if include_usage and not body.stream:
        raise BodyError('stream_options needs a stream; write "stream": true', param="stream_options")
    said = _said_max_tokens(body)
    structure = _structure(body)
    offer = offer_of(body, tools, answer_schema(structure)) if isinstance(body, ChatBody) else None
    if offer is not None and structure is not None and "structural_tag" in structure:
        message = "response_format is a structural tag and tools are given; no answer can follow both, so leave one out"
        raise BodyError(message, param="response_format")
    use = reasoning_of(body, reasoning) if isinstance(body, ChatBody) else None
    usual = defaults.get("max_tokens") if isinstance(body, ChatBody) else _COMPLETION_TOKENS
    return call_of(
        body,
        endpoint=Endpoint.CHAT if isinstance(body, ChatBody) else Endpoint.COMPLETIONS,
        prompts=_prompts(body, offer, tools, reasoning),
        offer=offer,
        reasoning=use,
        structure=structure,
        defaults=defaults,
        given={
            "max_tokens": next((most for most in (said, model.get("default_max_tokens")) if most is not None), usual),
            "logprobs": _logprobs(body),
            "prompt_logprobs": _prompt_logprobs(body),
        },
        said_max_tokens=said is not None,
        include_usage=include_usage,
        running_usage=include_usage and bool(options and options.continuous_usage_stats),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        scores=body.prompt_logprobs,
        ignored=body.ignored,
        structure_field="structured_outputs" if body.response_format is None else "response_format",
        keep_marked_alone=body.prompt_cache_options is not None and body.prompt_cache_options.mode == "explicit",
    )


def _prompts(
    body: Body, offer: Offer | None, tools: ModelTools | None, reasoning: ModelReasoning | None
) -> tuple[PromptInput, ...]:
    if isinstance(body, ChatBody):
        return (_chat_prompt(body, offer, tools, reasoning),)
    return _completion_prompts(cast(CompletionBody, body))


def _chat_prompt(
    body: ChatBody, offer: Offer | None, tools: ModelTools | None, reasoning: ModelReasoning | None
) -> PromptInput:
    conversation = body.messages or None  # clients that require messages send an empty list beside a prompt
    _require_one(body, {"messages": conversation, "prompt": body.prompt, "pml": body.pml})
    asked = {name: value for name in CHAT_OPTIONS if (value := getattr(body, name)) is not None}
    if told := variables_for(body.reasoning_effort, reasoning, "reasoning_effort"):
        asked["chat_template_kwargs"] = {**told, **asked.get("chat_template_kwargs", {})}
    if conversation is None:
        if offer is not None:
            raise BodyError("tools are given with a prompt of a schema; give them with messages", param="tools")
        for name in asked:
            raise BodyError(f"{name} is given with a prompt of a schema; give it with messages", param=name)
        return _schema_prompt(body.prompt, body.pml)
    ttl = None if body.prompt_cache_options is None else body.prompt_cache_options.ttl
    messages = with_family_ids(for_template(conversation, ttl), tools)
    prompt = chat_prompt(messages, offer, asked.pop("chat_template_kwargs", {}), **asked)
    if not isinstance(prompt, Mapping):
        return prompt
    try:
        unwrap(prompt).options.check_last(messages)
    except ParameterError as error:
        raise BodyError(str(error).rstrip("."), param=field_of(str(error), body)) from None
    return prompt


def _completion_prompts(body: CompletionBody) -> tuple[PromptInput, ...]:
    _require_one(body, {"prompt": body.prompt, "pml": body.pml})
    given = body.prompt
    if given is None or isinstance(given, Mapping):
        return (_schema_prompt(given, body.pml),)
    prompts: Sequence[str | Sequence[int]]
    prompts = [given] if isinstance(given, str) or _is_ids(given) else given  # type: ignore[assignment, list-item]
    if not all(len(prompt) for prompt in prompts) or not prompts:
        raise BodyError("prompt is empty; give at least one token", param="prompt")
    return tuple(prompts)


def _is_ids(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def _require_one(body: Body, given: Mapping[str, object]) -> None:
    """Check that exactly one of these fields is given."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise BodyError(f"{' and '.join(named)} are both given; keep one of them", param=named[1])
    if not named:
        first, *others = given
        raise BodyError(f"there is no prompt; give {first}, or a schema's prompt as {' or '.join(others)}", param=first)


def _schema_prompt(document: Mapping[str, Any] | None, pml: str | None) -> Prompt:
    if pml is not None:
        if pml.count("<") > MAX_TAGS:
            raise BodyError(f"pml holds more than {MAX_TAGS:,} tags; import fewer modules", param="pml")
        return Prompt.from_string(pml, source="pml")
    assert document is not None, "one of the two is given"
    return Prompt.from_json(document, source="prompt")


def _said_max_tokens(body: Body) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is not None and body.max_tokens is not None:
        raise BodyError("max_tokens and max_completion_tokens are both given; keep one of them", param="max_tokens")
    return newer if newer is not None else body.max_tokens


def _logprobs(body: Body) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise BodyError('top_logprobs is given without logprobs; write "logprobs": true', param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _prompt_logprobs(body: Body) -> int | None:
    """Return the number of alternatives for prompt tokens: the largest number that any field asks for."""
    if body.stream and body.prompt_logprobs is not None:
        raise BodyError("prompt_logprobs does not work with stream; leave stream out", param="prompt_logprobs")
    asked = [body.prompt_logprobs]
    if isinstance(body, CompletionBody) and body.echo:
        spelled = body.prompt is not None and (isinstance(body.prompt, str) or _all_texts(body.prompt))
        # An echo needs the text of token ids, which only scoring decodes. Without new tokens, the request must score
        # the prompt.
        asked.append(0 if body.logprobs is None and (body.max_tokens == 0 or not spelled) else body.logprobs)
    return max((one for one in asked if one is not None), default=None)


def _all_texts(prompts: Any) -> bool:
    return isinstance(prompts, list) and isinstance(prompts[0] if prompts else "", str)


def _structure(body: Body) -> Mapping[str, Any] | None:
    if body.response_format is None:
        return body.structured_outputs
    if body.structured_outputs is not None:
        raise BodyError(
            "response_format and structured_outputs are both given; keep one of them", param="response_format"
        )
    return _format(body.response_format)


def _format(wanted: ResponseFormat) -> Mapping[str, Any] | None:
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise BodyError(
            'response_format holds a json_schema exactly if its type is "json_schema"; write '
            '{"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}',
            param="response_format",
        )
    tag = {"structures": wanted.structures, "triggers": wanted.triggers}
    given = [value is not None for value in tag.values()]
    if not all(given) if wanted.type == "structural_tag" else any(given):
        raise BodyError(
            'response_format holds structures and triggers exactly if its type is "structural_tag"; write '
            '{"type": "structural_tag", "structures": […], "triggers": […]}',
            param="response_format",
        )
    if wanted.type == "structural_tag":
        return {"structural_tag": tag}
    if wanted.json_schema is not None:
        return {"json": bounded_schema(wanted.json_schema.schema_, "response_format")}
    return {"json_object": True} if wanted.type == "json_object" else None


def reasoning_of(body: ChatBody, model: ModelReasoning | None) -> ReasoningUse | None:
    """Return the form of reasoning in the answers to a body; None for a model without reasoning."""
    if model is None or model.format is None:
        return None
    last = _text(body.messages[-1]) if body.continue_final_message and body.messages else None
    return ReasoningUse(model, body.include_reasoning is not False, last)


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "".join(getattr(part, "text", "") for part in message.content)
    return message.content or ""


def offer_of(body: ChatBody, model: ModelTools | None, form: Mapping[str, Any] | None = None) -> Offer | None:
    """Return the tools that a request offers to its model; None for no tools. Raises BodyError.

    Args:
        body: the request.
        model: the model's format of tool calls; None for a model without tools.
        form: the schema of an answer without calls, if response_format asks for one.
    """
    functions = _functions(body)
    check_history(first_of_tools(body.messages or ()), "messages", model)
    offer = offer_tools(functions, _choice(body), model, form)
    if offer is not None:
        _check_alone(body)
    return offer


def _functions(body: ChatBody) -> list[OfferedFunction]:
    return [
        OfferedFunction(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            bool(tool.function.strict),
            f"tools[{number}].function.name",
            f"tools[{number}].function.parameters",
            None if (mark := tool.cache_control or tool.function.cache_control) is None else mark.mark,
        )
        for number, tool in enumerate(body.tools or ())
    ]


def _choice(body: ChatBody) -> OfferChoice:
    choice, one = body.tool_choice or "auto", body.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        return OfferChoice(must=True, names=(choice.function.name,), one=True)
    if isinstance(choice, AllowedTools):
        names = tuple(tool.function.name for tool in choice.allowed_tools.tools)
        return OfferChoice(must=choice.allowed_tools.mode == "required", names=names, one=one)
    return OfferChoice(must=choice == "required", never=choice == "none", one=one)


def _check_alone(body: ChatBody) -> None:
    """Raise BodyError for structured_outputs beside tools: a call is JSON, and structured_outputs may exclude JSON."""
    if body.structured_outputs is not None:
        remedy = 'write response_format, leave structured_outputs out, or write "tool_choice": "none"'
        message = f"structured_outputs and tools are both given, and no answer can follow both; {remedy}"
        raise BodyError(message, param="structured_outputs")
