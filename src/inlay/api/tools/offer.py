"""Interprets the tools of a request, for the model's template and for the form of the answer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.api.failures import BodyError
from inlay.api.reasoning import forced
from inlay.api.tools import ToolUse
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.schema import calls_schema, check_parameters
from inlay.sampling.json_schemas import holdable

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that a model may call.

    Args:
        name: of the function.
        description: for the model, or None.
        parameters: a JSON Schema of an object, or None for no parameters.
        strict: its schema applies exactly.
        named: the path to its name in the body.
        described: the path to its parameters in the body.
        mark: its mark as a module, or None.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    strict: bool
    named: str
    described: str
    mark: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class OfferChoice:
    """The tools that an answer may or must call.

    Args:
        must: the answer must be a call.
        never: the answer calls no tool.
        names: the tools that may be called; None for all.
        one: the answer is one call.
    """

    must: bool = False
    never: bool = False
    names: tuple[str, ...] | None = None
    one: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of one request.

    Args:
        tools: in the form of a chat template, with marks.
        use: creates the parsers of the answers.
        structure: the ``structured_outputs`` that force the answer to be a call, or None.
    """

    tools: tuple[dict[str, Any], ...]
    use: ToolUse
    structure: Mapping[str, Any] | None


def offer_tools(
    functions: Sequence[OfferedFunction],
    choice: OfferChoice,
    model: ModelTools | None,
    form: Mapping[str, Any] | None = None,
) -> Offer | None:
    """Return the tools that a request offers to its model; None for no tools. Raises BodyError.

    Args:
        functions: the tools of the request.
        choice: its tool_choice.
        model: the model's format of tool calls; None for a model without tools.
        form: the schema of an answer without calls, if the request has one.
    """
    _check_functions(functions)
    if not functions or choice.never:
        if choice.must or choice.names is not None:
            raise BodyError("tool_choice asks for a call, and there are no tools; give tools", param="tool_choice")
        return None
    if model is None:
        message = "tools are given, and this model's chat template has no place for them; leave them out, or take a "
        raise BodyError(f"{message}model that was trained to call tools", param="tools", code="unsupported_field")
    chosen = _chosen(functions, choice)
    form = None if choice.must else form
    held = choice.must or form is not None
    parallel = model.parallel and not choice.one
    use = ToolUse(
        model,
        {function.name: function.parameters or _NOTHING for function in chosen},
        held,
        parallel,
        formed=form is not None,
    )
    structure = _structure(chosen, model, several=parallel, instead=form) if held else None
    return Offer(tuple(map(_for_template, functions)), use, structure)


def check_history(number: int | None, field: str, model: ModelTools | None) -> None:
    """Refuse past calls if the model's template does not show them. Raises BodyError.

    Args:
        number: of the first message with a call or a result, or None.
        field: the field of messages.
        model: the model's format of tool calls; None for a model without tools.
    """
    if number is not None and (model is None or not model.history):
        place = f"{field}[{number}]"
        message = f"{place} calls a tool or is the result of a call, which this model's chat template does not show"
        raise BodyError(f"{message}; leave it out", param=place, code="unsupported_field")


def _check_functions(functions: Sequence[OfferedFunction]) -> None:
    names: dict[str, int] = {}
    for number, function in enumerate(functions):
        if function.name in names:
            message = f"{function.named} is {function.name!r}, as is that of tools[{names[function.name]}]; rename one"
            raise BodyError(message, param=function.named)
        names[function.name] = number
        check_parameters(function.parameters or _NOTHING, function.described)


def _chosen(functions: Sequence[OfferedFunction], choice: OfferChoice) -> list[OfferedFunction]:
    """Return the functions that may be called, in their order among the tools."""
    if choice.names is None:
        return list(functions)
    known = {function.name for function in functions}
    for name in sorted(set(choice.names) - known):
        message = f"tool_choice is {name!r:.80}, and no tool has that name; name one of the tools"
        raise BodyError(message, param="tool_choice")
    return [function for function in functions if function.name in choice.names]


def _structure(
    functions: Sequence[OfferedFunction], model: ModelTools, *, several: bool, instead: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    named = [(function.name, function.parameters or _NOTHING) for function in functions]
    strict = frozenset(function.name for function in functions if function.strict)
    schema = calls_schema(named, key=model.format.key, several=several, instead=instead, strict=strict)
    if not model.format.harmony:
        return {"json": schema}
    held = {name: holdable(parameters, sets_as_lists=name not in strict) for name, parameters in named}
    return {"structural_tag": forced(held, instead)}


def _for_template(function: OfferedFunction) -> dict[str, Any]:
    """Return a tool in the form of templates. Some templates fail without parameters."""
    described = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or {"type": "object", "properties": {}}
    made = {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}
    return made if function.mark is None else {**made, "cache_control": dict(function.mark)}


_NINE = re.compile(r"[A-Za-z0-9]{9}")


def with_family_ids(messages: Sequence[dict[str, Any]], model: ModelTools | None) -> list[dict[str, Any]]:
    """Return messages whose calls and results have ids of the model's family. The ids depend on earlier turns alone.

    Args:
        messages: in the form of chat templates.
        model: the model's tools; None for a model without tools.
    """
    form = None if model is None else model.format.ids
    if form is None:
        return list(messages)
    ids: dict[str, str] = {}
    made, count = [], 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            ids[call["id"]] = f"functions.{name}:{count}" if form == "numbered" else _nine(call["id"])
            calls.append({**call, "id": ids[call["id"]]})
            count += 1
        changed: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if message.get("tool_call_id") in ids:
            changed["tool_call_id"] = ids[message["tool_call_id"]]
        made.append({**message, **changed})
    return made


def _nine(name: str) -> str:
    return name if _NINE.fullmatch(name) else hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:9]
