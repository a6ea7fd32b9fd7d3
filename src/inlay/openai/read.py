"""JSON → the body of a request, or a sentence for everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from inlay.openai.bodies import NO_EFFECT, UNSUPPORTED, Body, ChatBody, CompletionBody, Endpoint, Form, Message, Tool
from inlay.openai.failures import BodyError
from inlay.openai.messages import Problem, problems_of
from inlay.pml.problems import lone_surrogate

_FORMS: dict[Endpoint, type[Body]] = {Endpoint.CHAT: ChatBody, Endpoint.COMPLETIONS: CompletionBody}
_SHOWN = 60  # characters of a value that a sentence repeats
_MAX_BITS = 200
_MAX_NESTING = 128  # lists and objects inside each other, the body's own counted

#: Fields that are lists of objects: what is wrong in one of these is told with its number.
_MEMBERS: dict[str, tuple[type[Form], str, str]] = {
    "messages": (Message, "message", 'a message {"role": "user", "content": "…"}'),
    "tools": (Tool, "tool", 'a tool {"type": "function", "function": {…}}'),
}

#: Where null is the same as leaving a key out: for each kind of object, its keys that hold other kinds.
_NULLABLE: dict[str, dict[str, str]] = {
    "messages": {"content": "part", "tool_calls": "call"},
    "part": {"cache_control": "mark", "prompt_cache_breakpoint": "mark"},
    "mark": {},
    "call": {"function": "function"},
    "tools": {"function": "function"},
    "function": {},
    "response_format": {"json_schema": "json_schema"},
    "json_schema": {},
    "stream_options": {},
}


def read_body(raw: Any, endpoint: Endpoint) -> Body:
    """The body of a request; the fields that have no effect are gone. Raises BodyError, which names every problem."""
    if not isinstance(raw, Mapping):
        raise BodyError(f"the body is {shown(raw)}; it must be an object")
    given = {str(name): value for name, value in raw.items() if value is not None and name not in NO_EFFECT}
    for name, value in given.items():
        _check_values(name, value)
    form = _FORMS[endpoint]
    problems = _unsupported(given, form, endpoint)
    kept = {name: _without_nulls(name, value) for name, value in given.items() if name in form.model_fields}
    try:
        body = form.model_validate(kept)
    except ValidationError as error:
        problems += _wrong(error, kept, form)
    else:
        if isinstance(body, ChatBody):
            problems += problems_of(body.messages or ())
    if problems:
        param, code, _ = problems[0]
        raise BodyError(". Also: ".join(sentence for _, _, sentence in problems), param=param, code=code)
    return body


def shown(value: Any) -> str:
    """A value of JSON in a few words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | Mapping):
        kind = "list" if isinstance(value, list) else "object"
        return f"{'a list' if kind == 'list' else 'an object'} of {len(value):,}" if value else f"an empty {kind}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a huge number"  # which Python may refuse to write
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _unsupported(given: Mapping[str, Any], form: type[Body], endpoint: Endpoint) -> list[Problem]:
    """The fields that this endpoint does not take."""
    problems: list[Problem] = []
    for name, value in given.items():
        if name in form.model_fields:
            continue
        if name in UNSUPPORTED:
            harmless, remedy = UNSUPPORTED[name]
            if not any(value == one and type(value) is type(one) for one in harmless):
                problems.append((name, "unsupported_field", f"{name} is not supported: {remedy}"))
            continue
        near = get_close_matches(name, form.model_fields, n=1)
        remedy = f"did you mean {near[0]}?" if near else "leave it out"
        problems.append((name, "unknown_field", f"{endpoint} takes no field {shown(name)}; {remedy}"))
    return problems


def _check_values(name: str, value: Any) -> None:
    """Raises BodyError for what no tokenizer, template or grammar takes: see the sentences."""
    if problem := lone_surrogate(name):
        raise BodyError(f"the name of a field holds {problem}")
    level, depth = [value], 1
    while level:
        inside: list[Any] = []
        for one in level:
            if type(one) is int:  # first, as there may be a prompt of them
                continue
            if isinstance(one, str):
                if problem := lone_surrogate(one):
                    raise BodyError(f"{name} holds {problem}", param=name)
            elif isinstance(one, Mapping):
                inside += one
                inside += one.values()
            elif isinstance(one, list):
                inside += one
            elif isinstance(one, float) and not math.isfinite(one):
                message = f"{name} holds NaN or Infinity, which are no values of JSON; write a number"
                raise BodyError(message, param=name)
        level, depth = inside, depth + 1
        if depth > _MAX_NESTING:
            raise BodyError(f"{name} nests lists and objects too deeply; nest them less deeply", param=name)


def _without_nulls(kind: str, value: Any) -> Any:
    """A field's value; null where _NULLABLE says so is the same as leaving the key out."""
    if kind not in _NULLABLE:
        return value
    if isinstance(value, list):
        return [_without_nulls(kind, member) for member in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _without_nulls(_NULLABLE[kind].get(key, ""), inner) for key, inner in value.items() if inner is not None
    }


def _wrong(error: ValidationError, given: Mapping[str, Any], form: type[Body]) -> list[Problem]:
    """What pydantic found, in sentences of our own: one a field, or one a message's field."""
    found: dict[str, Problem] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        name, *inner = one["loc"]
        field = str(name)
        if field in _MEMBERS and inner:
            param, sentence = _wrong_member(field, given[field], inner, one["type"])
        else:
            param = field
            sentence = f"{field} is {shown(given[field])}; it must be {form.model_fields[field].description}"
        found.setdefault(param, (param, "invalid_value", sentence))
    return list(found.values())


def _wrong_member(name: str, members: list[Any], inner: list[int | str], kind: str) -> tuple[str, str]:
    """A field of a member of a list, and what is wrong with it. inner: where, from the member's number on."""
    form, called, example = _MEMBERS[name]
    number = int(inner[0])
    place, member = f"{name}[{number}]", members[number]
    if len(inner) == 1:
        return place, f"{place} is {shown(member)}; it must be {example}"
    field = str(inner[1])
    param = f"{place}.{field}"
    if kind == "extra_forbidden" and len(inner) == 2:
        known = ", ".join(form.model_fields)
        return param, f"{place} has the field {shown(field)}, which is not supported; a {called} has {known}"
    what = f"it must be {form.model_fields[field].description}"
    if field not in member:
        return param, f"{place} has no {field}; {what}"
    return param, f"{param} is {shown(member[field])}; {what}"
