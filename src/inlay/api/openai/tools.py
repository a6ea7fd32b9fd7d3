"""Translates the tools of a chat's body. ``api.tools.offer`` interprets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inlay.api.failures import BodyError
from inlay.api.openai.bodies import AllowedTools, ChatBody, NamedTool
from inlay.api.openai.messages import first_of_tools
from inlay.api.tools.formats import ModelTools
from inlay.api.tools.offer import Function, Offer, ToolChoice, check_history, offer_tools


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


def _functions(body: ChatBody) -> list[Function]:
    return [
        Function(
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


def _choice(body: ChatBody) -> ToolChoice:
    choice, one = body.tool_choice or "auto", body.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        return ToolChoice(must=True, names=(choice.function.name,), one=True)
    if isinstance(choice, AllowedTools):
        names = tuple(tool.function.name for tool in choice.allowed_tools.tools)
        return ToolChoice(must=choice.allowed_tools.mode == "required", names=names, one=one)
    return ToolChoice(must=choice == "required", never=choice == "none", one=one)


def _check_alone(body: ChatBody) -> None:
    """Refuse structured_outputs beside tools, because a call is JSON and structured_outputs may ask for any form."""
    if body.structured_outputs is not None:
        remedy = 'write response_format, leave structured_outputs out, or write "tool_choice": "none"'
        message = f"structured_outputs and tools are both given, and no answer can follow both; {remedy}"
        raise BodyError(message, param="structured_outputs")
