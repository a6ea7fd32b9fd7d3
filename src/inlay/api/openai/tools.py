"""Interprets the tools of a body, for the model's template and for the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.api.failures import BodyError
from inlay.api.openai.bodies import AllowedTools, ChatBody, Function, NamedTool
from inlay.api.openai.messages import first_of_tools
from inlay.api.tools import ToolUse
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.schema import calls_schema, check_parameters

Choice = str | NamedTool | AllowedTools

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of one request.

    Args:
        tools: in the form of a chat template.
        use: creates the parsers of the answers.
        structure: the ``structured_outputs`` that force the answer to be a call, or None.
    """

    tools: tuple[dict[str, Any], ...]
    use: ToolUse
    structure: Mapping[str, Any] | None


def offer_of(body: ChatBody, model: ModelTools | None, form: Mapping[str, Any] | None = None) -> Offer | None:
    """Return the tools that a request offers to its model; None for no tools. Raises BodyError.

    Args:
        body: the request.
        model: the model's format of tool calls; None for a model without tools.
        form: the schema of an answer without calls, if response_format asks for one.
    """
    functions = [tool.function for tool in body.tools or ()]
    _check_functions(functions)
    _check_history(body, model)
    choice = body.tool_choice or "auto"
    if not functions or choice == "none":
        _check_no_call(choice)
        return None
    if model is None:
        message = "tools are given, and this model's chat template has no place for them; leave them out, or take a "
        raise BodyError(f"{message}model that was trained to call tools", param="tools", code="unsupported_field")
    _check_alone(body)
    chosen = _chosen(functions, choice)
    forced = not _leaves_open(choice)
    form = None if forced else form
    held = forced or form is not None
    parallel = model.parallel and body.parallel_tool_calls is not False
    use = ToolUse(model, frozenset(function.name for function in chosen), held, parallel, formed=form is not None)
    several = parallel and not isinstance(choice, NamedTool)
    structure = _structure(chosen, model, several=several, instead=form) if held else None
    return Offer(tuple(map(_for_template, functions)), use, structure)


def _check_functions(functions: Sequence[Function]) -> None:
    names: dict[str, int] = {}
    for number, function in enumerate(functions):
        place = f"tools[{number}].function"
        if function.name in names:
            message = f"{place}.name is {function.name!r}, as is that of tools[{names[function.name]}]; rename one"
            raise BodyError(message, param=f"{place}.name")
        names[function.name] = number
        check_parameters(function.parameters or _NOTHING, f"{place}.parameters")


def _check_history(body: ChatBody, model: ModelTools | None) -> None:
    number = first_of_tools(body.messages or ())
    if number is not None and (model is None or not model.history):
        place = f"messages[{number}]"
        message = f"{place} calls a tool or is the result of a call, which this model's chat template does not show"
        raise BodyError(f"{message}; leave it out", param=place, code="unsupported_field")


def _leaves_open(choice: Choice) -> bool:
    """True if the model decides to call a tool or not."""
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "auto"
    return choice in ("auto", "none")


def _check_no_call(choice: Choice) -> None:
    if not _leaves_open(choice) or isinstance(choice, AllowedTools):
        raise BodyError("tool_choice asks for a call, and there are no tools; give tools", param="tool_choice")


def _check_alone(body: ChatBody) -> None:
    """Refuse structured_outputs beside tools, because a call is JSON and structured_outputs may ask for any form."""
    if body.structured_outputs is not None:
        remedy = 'write response_format, leave structured_outputs out, or write "tool_choice": "none"'
        message = f"structured_outputs and tools are both given, and no answer can follow both; {remedy}"
        raise BodyError(message, param="structured_outputs")


def _chosen(functions: Sequence[Function], choice: Choice) -> list[Function]:
    """Return the functions that may be called, in their order among the tools."""
    if isinstance(choice, str):
        return list(functions)
    tools = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
    names, known = {tool.function.name for tool in tools}, {function.name for function in functions}
    for name in sorted(names - known):
        message = f"tool_choice is {name!r:.80}, and no tool has that name; name one of the tools"
        raise BodyError(message, param="tool_choice")
    return [function for function in functions if function.name in names]


def _structure(
    functions: Sequence[Function], model: ModelTools, *, several: bool, instead: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    named = [(function.name, function.parameters or _NOTHING) for function in functions]
    strict = frozenset(function.name for function in functions if function.strict)
    return {"json": calls_schema(named, key=model.format.key, several=several, instead=instead, strict=strict)}


def _for_template(function: Function) -> dict[str, Any]:
    """Return a tool in the form of templates. Some templates fail without parameters."""
    described = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}
