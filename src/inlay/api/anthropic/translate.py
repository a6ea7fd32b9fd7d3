"""Translates a checked body of the Messages API into a call."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from inlay.api.anthropic.blocks import AssistantMessage, first_of_tools, turns_of
from inlay.api.anthropic.bodies import CountBody, Endpoint
from inlay.api.call import Call, StoredAnswer
from inlay.api.failures import BodyError
from inlay.api.reasoning import ModelReasoning, ReasoningUse, effort_variables, reasons, switch_on
from inlay.api.sampling import answer_schema, bounded_schema, call_of, chat_prompt
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.offer import Offer, OfferChoice, OfferedFunction, check_history, offer_tools, with_family_ids

_FIELDS = {"stop": "stop_sequences"}


def translate(
    body: CountBody,
    *,
    default_max_tokens: int | None = None,
    tools: ModelTools | None = None,
    reasoning: ModelReasoning | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    stored: Mapping[str, StoredAnswer] = MappingProxyType({}),
) -> Call:
    """Translate a body into a call. See ``Dialect.translate``. Raises BodyError."""
    structure = _structure(body)
    offer = _offer(body, tools, structure)
    turns = with_family_ids(turns_of(body.system, body.messages, body.cache_control), tools)
    if not turns:
        raise BodyError("messages has no text; give a message of the user", param="messages")
    last = _to_continue(body, turns)
    variables, ignored = _thinking(body, reasoning)
    use = None
    if reasons(reasoning):
        assert reasoning is not None, "a model that reasons has a form of it"
        use = ReasoningUse(reasoning, _shows_thinking(body), last)
    options = {} if last is None else {"continue_final_message": True}
    stop = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
    return call_of(
        body,
        endpoint=Endpoint.MESSAGES,
        prompts=(chat_prompt(turns, offer, variables, **options),),
        offer=offer,
        reasoning=use,
        structure=structure,
        defaults=defaults,
        given={"max_tokens": body.max_tokens, **stop},
        names=_FIELDS,
        said_max_tokens=True,
        structure_field="output_config",
        ignored=tuple(sorted((*body.ignored, *ignored))),
    )


def _offer(body: CountBody, model: ModelTools | None, structure: Mapping[str, Any] | None) -> Offer | None:
    check_history(first_of_tools(body.messages), "messages", model)
    functions = [
        OfferedFunction(
            tool.name,
            tool.description,
            tool.input_schema,
            bool(tool.strict),
            f"tools[{number}].name",
            f"tools[{number}].input_schema",
            None if tool.cache_control is None else tool.cache_control.mark,
        )
        for number, tool in enumerate(body.tools or ())
    ]
    return offer_tools(functions, _choice(body), model, answer_schema(structure))


def _choice(body: CountBody) -> OfferChoice:
    given = body.tool_choice
    if given is None:
        return OfferChoice()
    if (given.type == "tool") != (given.name is not None):
        message = "tool_choice has a name exactly if its type is 'tool'"
        raise BodyError(f'{message}; write {{"type": "tool", "name": "…"}}', param="tool_choice")
    return OfferChoice(
        must=given.type in ("any", "tool"),
        never=given.type == "none",
        names=None if given.name is None else (given.name,),
        one=bool(given.disable_parallel_tool_use) or given.type == "tool",
    )


def _structure(body: CountBody) -> Mapping[str, Any] | None:
    wanted = None if body.output_config is None else body.output_config.format
    return None if wanted is None else {"json": bounded_schema(wanted.schema_, "output_config")}


def _to_continue(body: CountBody, turns: list[dict[str, Any]]) -> str | None:
    """Return the start of the answer that the request ends with, or None. Raises BodyError."""
    if not isinstance(body.messages[-1], AssistantMessage) or not turns or turns[-1]["role"] != "assistant":
        return None
    place = f"messages[{len(body.messages) - 1}]"
    if turns[-1].get("tool_calls"):
        raise BodyError(f"{place} ends with a call; send the result of the call behind it", param=place)
    content = turns[-1]["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if not text:
        raise BodyError(f"{place} has no text that the answer could continue; leave it out", param=place)
    return text


def _thinking(body: CountBody, model: ModelReasoning | None) -> tuple[dict[str, Any], list[str]]:
    """Return the template variables for the reasoning that a body asks for, and the fields without effect."""
    ignored = []
    thinking, effort = body.thinking, None if body.output_config is None else body.output_config.effort
    variables: dict[str, Any] = {}
    if thinking is not None:
        if thinking.budget_tokens is not None:
            ignored.append("thinking.budget_tokens")
        off = thinking.type == "disabled"
        found = effort_variables("none", model) if off else switch_on(model)
        if found is None or (not off and not reasons(model)):
            ignored.append("thinking")
        variables |= found or {}
        effort = None if off else effort
    if effort is not None:
        found = effort_variables(effort, model)
        if found is None:
            ignored.append("output_config.effort")
        variables |= found or {}
    return variables, ignored


def _shows_thinking(body: CountBody) -> bool:
    thinking = body.thinking
    return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")
