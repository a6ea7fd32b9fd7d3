"""Translates a checked body into a call: prompts, sampling parameters and a reuse policy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from inlay.api.call import Call
from inlay.api.failures import BodyError
from inlay.api.openai.bodies import MAX_TAGS, Body, ChatBody, CompletionBody, Endpoint, ResponseFormat
from inlay.api.openai.messages import for_template
from inlay.api.openai.reasoning import effort_variables, reasoning_of
from inlay.api.openai.tools import Offer, offer_of
from inlay.api.reasoning import ModelReasoning, ReasoningUse
from inlay.api.tools.formats import ModelTools
from inlay.errors import ParameterError, PolicyError
from inlay.pml import Prompt
from inlay.policy import PolicyFields, log_deprecated
from inlay.prompt.inputs import CHAT_OPTIONS, PromptInput, unwrap
from inlay.sampling.bounded_schemas import bounded_document
from inlay.sampling.json_schemas import GrammarError, holdable
from inlay.sampling.params import SamplingParams

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; only the context limits a chat's answer

#: Fields that SamplingParams has with the same name and meaning.
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
)


def translate(
    body: Body,
    *,
    default_max_tokens: int | None = None,
    tools: ModelTools | None = None,
    reasoning: ModelReasoning | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Call:
    """Translate a body into a call.

    Args:
        body: the checked body.
        default_max_tokens: for requests without max_tokens. None takes OpenAI's: 16 for completions, the context for
            chats.
        tools: from ``model_tools(tokenizer)``; None for a model without tools.
        reasoning: from ``model_reasoning(tokenizer)``.
        defaults: ``llm.sampling_defaults``, for SamplingParams that the body does not set. Its max_tokens applies to
            chats only.

    Raises:
        BodyError: the body is inconsistent.
        PMLError: a prompt of a schema cannot be parsed.
    """
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    if include_usage and not body.stream:
        raise BodyError('stream_options needs a stream; write "stream": true', param="stream_options")
    said = _said_max_tokens(body)
    structure = _structure(body)
    offer = offer_of(body, tools, _form(structure)) if isinstance(body, ChatBody) else None
    if offer is not None and structure is not None and "structural_tag" in structure:
        message = "response_format is a structural tag and tools are given; no answer can follow both, so leave one out"
        raise BodyError(message, param="response_format")
    use = reasoning_of(body, reasoning) if isinstance(body, ChatBody) else None
    return Call(
        endpoint=Endpoint.CHAT if isinstance(body, ChatBody) else Endpoint.COMPLETIONS,
        model=body.model,
        prompts=_prompts(body, offer, reasoning),
        params=_params(
            body,
            said if said is not None else default_max_tokens,
            offer,
            structure if offer is None else offer.structure,
            use,
            defaults,
        ),
        said_max_tokens=said is not None,
        reuse=_policy(body),
        positions=body.positions,
        order=body.order,
        priority=body.priority or 0,
        stream=bool(body.stream),
        include_usage=include_usage,
        running_usage=include_usage and bool(options and options.continuous_usage_stats),
        tools=None if offer is None else offer.use,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        scores=body.prompt_logprobs,
        reasoning=use,
        ignored=body.ignored,
        structure_field="structured_outputs" if body.response_format is None else "response_format",
        keep_marked_alone=body.prompt_cache_options is not None and body.prompt_cache_options.mode == "explicit",
    )


def _policy(body: Body) -> str | None:
    """Return the key of the policy that a body asks for, or None. Raises BodyError."""
    given = PolicyFields(body.reuse, body.recompute, body.promote, body.across_adapters, body.tolerance)
    try:
        policy = given.policy(deprecated=log_deprecated)
    except PolicyError as error:
        raise BodyError(str(error), param=error.field, code=error.code) from None
    return None if policy is None else str(policy)


def _prompts(body: Body, offer: Offer | None, reasoning: ModelReasoning | None) -> tuple[PromptInput, ...]:
    if isinstance(body, ChatBody):
        return (_chat_prompt(body, offer, reasoning),)
    return _completion_prompts(cast(CompletionBody, body))


def _chat_prompt(body: ChatBody, offer: Offer | None, reasoning: ModelReasoning | None) -> PromptInput:
    conversation = body.messages or None  # clients that require messages send an empty list beside a prompt
    _require_one(body, {"messages": conversation, "prompt": body.prompt, "pml": body.pml})
    asked = {name: value for name in CHAT_OPTIONS if (value := getattr(body, name)) is not None}
    if told := effort_variables(body, reasoning):
        asked["chat_template_kwargs"] = {**told, **asked.get("chat_template_kwargs", {})}
    if conversation is None:
        if offer is not None:
            raise BodyError("tools are given with a prompt of a schema; give them with messages", param="tools")
        for name in asked:
            raise BodyError(f"{name} is given with a prompt of a schema; give it with messages", param=name)
        return _schema_prompt(body.prompt, body.pml)
    messages = for_template(conversation, None if body.prompt_cache_options is None else body.prompt_cache_options.ttl)
    if offer is not None:
        asked["tools"] = offer.tools
    if not asked:
        return messages
    prompt = {"messages": messages, **asked}
    try:
        unwrap(prompt).options.check_last(messages)
    except ParameterError as error:
        raise BodyError(str(error).rstrip("."), param=_field(str(error), body)) from None
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


def _params(
    body: Body,
    max_tokens: int | None,
    offer: Offer | None,
    structure: Mapping[str, Any] | None,
    reasoning: ReasoningUse | None,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    given = {**defaults, **{name: value for name in _PLAIN if (value := getattr(body, name)) is not None}}
    if body.seed is not None:
        given["seed"] = body.seed % 2**64
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    unsaid = defaults.get("max_tokens") if isinstance(body, ChatBody) else _COMPLETION_TOKENS
    given["max_tokens"] = max_tokens if max_tokens is not None else unsaid
    given["logprobs"] = _logprobs(body)
    given["prompt_logprobs"] = _prompt_logprobs(body)
    given["structured_outputs"] = structure
    if structure is not None and reasoning is not None and not reasoning.is_over:
        given["reasoning_end"] = reasoning.format.closes
        given["reasoning_start"] = reasoning.format.opens if reasoning.may_begin else None
    if offer is not None and offer.use.model.ends and not offer.use.held:
        given["skip_special_tokens"] = False  # marks of calls may be special tokens; the parser removes the final one
    try:
        return SamplingParams(**given)
    except ParameterError as error:
        raise BodyError(str(error).rstrip("."), param=_field(str(error), body)) from None


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


def _form(structure: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the JSON Schema that constrains an answer, if there is one."""
    if structure is None:
        return None
    form: Mapping[str, Any] | None = structure.get("json", {"type": "object"} if "json_object" in structure else None)
    return form


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
        return {"json": _bounded(wanted.json_schema.schema_)}
    return {"json_object": True} if wanted.type == "json_object" else None


def _bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with bounded answers. Raises BodyError if no grammar can enforce it."""
    try:
        return bounded_document(holdable(schema))
    except GrammarError as error:
        raise BodyError(f"response_format cannot be used: {error}", param="response_format") from error


def _token_id(token: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", token):
        raise BodyError(f"logit_bias has the key {token!r:.40}; its keys are token ids", param="logit_bias")
    return int(token)


def _field(message: str, body: Body) -> str | None:
    """Return the field at the start of an error message of SamplingParams."""
    name = re.match(r"\w*", message)
    field = name[0] if name else ""
    return field if field in type(body).model_fields else None
