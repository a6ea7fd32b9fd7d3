"""Interprets the tools of a request, for the model's template and for the form of the answer.

The JSON Schemas of their parameters are checked, and make the schema that forces an answer to be calls.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from inlay.api.call import Call
from inlay.api.failures import MAX_NAME, BodyError
from inlay.api.reasoning import forced
from inlay.api.tools import ToolUse
from inlay.api.tools.formats import ModelTools
from inlay.errors import StructureError
from inlay.sampling.grammar_forms import too_large
from inlay.sampling.json_schemas import BY_NAME, DATA, FREE, GrammarError, bounded, free_value, holdable, place_of
from inlay.wording import clip

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that a model may call.

    Args:
        name: of the function.
        description: for the model, or None.
        parameters: a JSON Schema of an object, or None for no parameters.
        strict: True if its schema applies exactly. False: items of a list may repeat despite ``uniqueItems``.
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
    """Return the functions that may be called, in the order of the request's tools."""
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
    """Return messages with the ids of calls and results rewritten to the form of the model's family.

    The new ids depend on earlier turns only, so the next request has the same.

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


_MAX_CALLS = 32  # in one answer with a grammar, so that the answer ends
# characters of a schema; compiling one of this size takes half a second, and the time grows with the square
_LONGEST_HELD = 2**16
# The key is True if there must be a call:
_ASKED = {True: "tool_choice asks for a call", False: "tools are given with response_format"}
_WITHOUT = {True: '"tool_choice": "auto"', False: '"tool_choice": "none"'}
_INSTEAD = "instead"  # the definition of an answer without calls
_LONGEST_REASON = 300  # characters
_DIALECTS = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)
# The separators of Python's json, which chat templates use. So the next turn of a conversation has the call's exact
# text, and finds it in the cache.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_parameters(parameters: Mapping[str, Any], param: str) -> None:
    """Raise BodyError if this is no JSON Schema of an object. ``param`` is the field."""
    if problem := _problem(parameters):
        raise BodyError(f"{param} is no JSON Schema of an object: {problem}; correct it", param=param)


def calls_schema(
    functions: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    key: str,
    several: bool,
    instead: Mapping[str, Any] | None = None,
    strict: Collection[str] = (),
) -> dict[str, Any]:
    """Return the schema of an answer that calls one of these functions, or a list of calls.

    Definitions of different functions stay separate. Arguments have a bounded length: see ``bounded``.

    Args:
        functions: names and parameters.
        key: the key of a call's arguments.
        several: allow several calls.
        instead: the schema of an answer without calls; None if there must be a call.
        strict: functions whose schemas apply exactly. For others, items of a list may repeat.

    Raises:
        BodyError: no grammar can enforce the schema.
    """
    forced = instead is None
    one: dict[str, Any] = {"anyOf": [_call(name, number, key) for number, (name, _) in enumerate(functions)]}
    shape = {"type": "array", "items": one, "minItems": 1, "maxItems": _MAX_CALLS} if several else one
    definitions = {}
    for number, (name, parameters) in enumerate(functions):
        try:
            held = holdable(parameters, sets_as_lists=name not in strict)
        except GrammarError as error:
            raise _not_held(str(error), name, forced=forced) from error
        definitions[str(number)] = bounded({"type": "object", **_moved(held, str(number))})
    definitions[FREE] = free_value()
    if instead is not None:
        shape = {"anyOf": [shape, {"$ref": f"#/$defs/{_INSTEAD}"}]}
        definitions[_INSTEAD] = _moved(instead, _INSTEAD)
    schema = {"x-guidance": _SPACING, **shape, "$defs": definitions}
    text = json.dumps(schema)
    if len(text) > _LONGEST_HELD:
        raise BodyError(
            f"{_ASKED[forced]}, and the parameters of {len(functions)} tools take {len(text):,} characters, "
            f"more than the {_LONGEST_HELD:,} that a grammar can hold; name one tool, or write {_WITHOUT[forced]}",
            param="tools",
        )
    if problem := too_large(schema):
        raise _not_held(problem, None, forced=forced)
    return schema


def call_failure(error: StructureError, schema: Mapping[str, Any]) -> BodyError:
    """Return the error for tools whose calls no grammar can enforce. ``schema`` is from ``calls_schema``."""
    forced, definitions = _INSTEAD not in schema["$defs"], schema["$defs"]
    start, *rest = error.place[1:] if error.place[:1] == ("$defs",) else ("",)
    if start in ("", FREE, _INSTEAD) or start not in definitions:
        return _not_held(error.reason, None, forced=forced)
    reason = f"at {place_of(rest)}, {error.reason}" if rest else error.reason
    calls = schema if forced else schema["anyOf"][0]
    return _not_held(
        reason, calls.get("items", calls)["anyOf"][int(start)]["properties"]["name"]["const"], forced=forced
    )


def _not_held(problem: str, name: str | None, *, forced: bool) -> BodyError:
    """Return the error for parameters that no grammar can enforce. ``name`` is the function, if known."""
    of = "these parameters" if name is None else f"the parameters of {name!r}"
    held = f"one to {of}" if forced else ("an answer to both" if name is None else f"a call to {of}")
    return BodyError(
        f"{_ASKED[forced]}, and no grammar can hold {held}: {clip(problem, _LONGEST_REASON)}; write "
        f"{_WITHOUT[forced]}, or change the parameters",
        param="tools",
    )


def _call(name: str, number: int, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{number}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a schema to be placed among the definitions of a larger one, with its references adjusted."""
    kept = {key: value for key, value in schema.items() if key not in ("$schema", "x-guidance")}
    moved: dict[str, Any] = _with_references(kept, f"#/$defs/{name}")
    return moved


def _with_references(schema: Any, root: str, *, by_name: bool = False) -> Any:
    """Return the schema with its references below ``root``. ``by_name``: its keys are names, not keywords."""
    if isinstance(schema, list):
        return [_with_references(inner, root) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {
        key: value
        if key in DATA and not by_name
        else _with_references(value, root, by_name=key in BY_NAME and not by_name)
        for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if not by_name and isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        made["$ref"] = root + reference[1:]
    return made


def _problem(schema: Mapping[str, Any]) -> str | None:
    """Return the reason that this is no schema of objects; None if it is one."""
    if schema.get("type", "object") != "object":
        return 'its "type" must be "object"'
    return schema_problem(schema)


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """Return the reason that this is no JSON Schema; None if it is one."""
    dialect = schema.get("$schema")
    # an unknown dialect would be looked up on the network
    known = dialect if dialect in _DIALECTS else _DIALECTS[-1]
    try:
        jsonschema_rs.meta.validate({**schema, "$schema": known})
    except jsonschema_rs.ValidationError as error:
        reason = clip(error.message, _LONGEST_REASON)
        place = clip(".".join(map(str, error.instance_path)), MAX_NAME)
        return f"{place}: {reason}" if place else reason
    return None


def structure_failure(call: Call, error: StructureError) -> BodyError:
    """Return the error for the client. It names the field and the place in its schema."""
    if not error.reason:  # it came from another process
        return BodyError(str(error).rstrip("."), param=call.structure_field)
    schema = (call.params.structured_outputs or {}).get("json")
    if call.tools is not None and call.tools.held and schema is not None:
        return call_failure(error, schema)
    at = f"at {place_of(error.place)}, " if error.place else ""
    kind = next(iter(call.params.structured_outputs or ()), "json")
    field = f"structured_outputs['{kind}']" if call.structure_field == "structured_outputs" else call.structure_field
    return BodyError(f"{field} cannot be used: {at}{error.reason}", param=call.structure_field)
