"""Checks the JSON of a request by OpenAI's rules, and translates the checked body into a call.

A call has prompts, tools, reasoning, sampling parameters and a reuse policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

from inlay.api.call import Call, OfModel
from inlay.api.failures import BodyError
from inlay.api.foreign import IGNORED
from inlay.api.openai.bodies import (
    LARGEST,
    LONGEST,
    MAX_PROMPTS,
    MAX_TAGS,
    NO_EFFECT,
    UNSUPPORTED,
    AllowedTools,
    Body,
    ChatBody,
    CompletionBody,
    Endpoint,
    NamedTool,
    ResponseFormat,
    Tool,
)
from inlay.api.openai.messages import Message, first_of_tools, for_template, form_of, problems_of
from inlay.api.reading import BodyRules, Members, all_of, check_values, read_fields
from inlay.api.reasoning import ModelReasoning, ReasoningUse, variables_for
from inlay.api.sampling import answer_schema, bounded_schema, call_of, chat_prompt, field_of
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.offer import Offer, OfferChoice, OfferedFunction, check_history, offer_tools, with_family_ids
from inlay.errors import ParameterError
from inlay.pml import Prompt
from inlay.prompt.inputs import CHAT_OPTIONS, PromptInput, unwrap
from inlay.wording import shown

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
    """Refuse structured_outputs beside tools, because a call is JSON and structured_outputs may ask for any form."""
    if body.structured_outputs is not None:
        remedy = 'write response_format, leave structured_outputs out, or write "tool_choice": "none"'
        message = f"structured_outputs and tools are both given, and no answer can follow both; {remedy}"
        raise BodyError(message, param="structured_outputs")
