"""Makes a call from the common fields of a body: its sampling parameters, its reuse policy and its prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.api.call import Call
from inlay.api.failures import BodyError
from inlay.api.reading import CommonBody
from inlay.api.reasoning import ReasoningUse, forced
from inlay.api.tools.offer import Offer, schema_problem
from inlay.errors import ParameterError, PolicyError
from inlay.policy import PolicyFields, log_deprecated
from inlay.prompt.inputs import PromptInput
from inlay.sampling.json_schemas import GrammarError, bounded_document, holdable
from inlay.sampling.params import SamplingParams

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


def policy_key(body: CommonBody) -> str | None:
    """Return the key of the policy that a body asks for, or None. Raises BodyError."""
    given = PolicyFields(body.reuse, body.recompute, body.promote, body.across_adapters, body.tolerance, body.find)
    try:
        policy = given.policy(deprecated=log_deprecated)
    except PolicyError as error:
        raise BodyError(str(error), param=error.field, code=error.code) from None
    return None if policy is None else str(policy)


def call_of(
    body: CommonBody,
    *,
    offer: Offer | None,
    reasoning: ReasoningUse | None,
    structure: Mapping[str, Any] | None,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    names: Mapping[str, str] | None = None,
    include_usage: bool = True,
    **more: Any,
) -> Call:
    """Return the call of a body. Raises BodyError if a value is out of range.

    Args:
        body: the checked body.
        include_usage, more: further fields of Call.
        offer: its tools.
        reasoning: the form of reasoning in its answers.
        structure: the form of its answer, without tools.
        defaults: ``llm.sampling_defaults``.
        given: sampling parameters that the body has under other names.
        names: parameter → the body's field, where they differ.
    """
    return Call(
        model=body.model,
        params=_sampling_params(body, offer, reasoning, structure, {**defaults, **given}, names),
        reuse=policy_key(body),
        positions=body.positions,
        order=body.order,
        diagnostics=body.diagnostics is True,
        priority=body.priority or 0,
        stream=body.stream is True,
        include_usage=include_usage,
        tools=None if offer is None else offer.use,
        reasoning=reasoning,
        **more,
    )


def chat_prompt(
    turns: Sequence[dict[str, Any]], offer: Offer | None, variables: Mapping[str, Any], **options: Any
) -> PromptInput:
    """Return the prompt of a conversation.

    Args:
        turns: its messages in the form of chat templates.
        offer: its tools.
        variables: of the template.
        options: more options of the template.
    """
    if offer is not None:
        options["tools"] = offer.tools
    if variables:
        options["chat_template_kwargs"] = variables
    prompt: Any = {"messages": turns, **options} if options else turns
    return prompt  # type: ignore[no-any-return]


def answer_schema(structure: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the JSON Schema that constrains an answer, if there is one."""
    if structure is None:
        return None
    form: Mapping[str, Any] | None = structure.get("json", {"type": "object"} if "json_object" in structure else None)
    return form


def _sampling_params(
    body: CommonBody,
    offer: Offer | None,
    reasoning: ReasoningUse | None,
    structure: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    names: Mapping[str, str] | None,
) -> SamplingParams:
    plain = {name: value for name in _PLAIN if (value := getattr(body, name, None)) is not None}
    params = {**given, **plain}
    if body.seed is not None:
        params["seed"] = body.seed % 2**64
    if body.logit_bias is not None:
        params["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    structure = structure if offer is None else offer.structure
    if reasoning is not None and reasoning.format.harmony and structure is not None and "json" in structure:
        structure = {"structural_tag": forced({}, structure["json"])}
    params["structured_outputs"] = structure
    if structure is not None and reasoning is not None and not reasoning.is_over:
        params["reasoning_end"] = reasoning.format.closes
        params["reasoning_start"] = reasoning.format.opens if reasoning.may_begin else None
    if _needs_special_tokens(offer, reasoning):
        params["skip_special_tokens"] = False  # the parser removes the final one
    try:
        return SamplingParams(**params)
    except ParameterError as error:
        raise BodyError(str(error).rstrip("."), param=field_of(str(error), body, names)) from None


def _needs_special_tokens(offer: Offer | None, reasoning: ReasoningUse | None) -> bool:
    """True if special tokens are marks of calls or of reasoning."""
    if reasoning is not None and reasoning.model.ends:
        return True
    return offer is not None and bool(offer.use.model.ends) and (offer.use.model.format.harmony or not offer.use.held)


def field_of(message: str, body: CommonBody, names: Mapping[str, str] | None = None) -> str | None:
    """Return the body's field for the parameter at the start of an error message."""
    found = re.match(r"\w*", message)
    name = found[0] if found else ""
    name = (names or {}).get(name, name)
    return name if name in type(body).model_fields else None


def bounded_schema(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a schema with bounded answers. Raises BodyError if no grammar can enforce it.

    Args:
        schema: the JSON Schema of an answer.
        field: the body's field that has it.
    """
    if problem := schema_problem(schema):
        raise BodyError(f"{field} has no JSON Schema: {problem}; correct it", param=field)
    try:
        return bounded_document(holdable(schema))
    except GrammarError as error:
        raise BodyError(f"{field} cannot be used: {error}", param=field) from error


def _token_id(token: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", token):
        raise BodyError(f"logit_bias has the key {token!r:.40}; its keys are token ids", param="logit_bias")
    return int(token)
