"""JSON → the body of a request, or a sentence for everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from inlay.openai.bodies import NO_EFFECT, UNSUPPORTED, Body, ChatBody, CompletionBody, Endpoint, Message
from inlay.openai.failures import BodyError

_FORMS: dict[Endpoint, type[Body]] = {Endpoint.CHAT: ChatBody, Endpoint.COMPLETIONS: CompletionBody}
_SHOWN = 60  # characters of a value that a sentence repeats

Problem = tuple[str | None, str | None, str]  # the field, the code, the sentence


def read_body(raw: Any, endpoint: Endpoint) -> Body:
    """The body of a request; the fields that have no effect are gone. Raises BodyError, which names every problem."""
    if not isinstance(raw, Mapping):
        raise BodyError(f"the body is {shown(raw)}; it must be an object")
    given = {str(name): value for name, value in raw.items() if value is not None and name not in NO_EFFECT}
    form = _FORMS[endpoint]
    problems = _unsupported(given, form, endpoint)
    kept = {name: _without_nulls(name, value) for name, value in given.items() if name in form.model_fields}
    try:
        body = form.model_validate(kept)
    except ValidationError as error:
        problems += _wrong(error, kept, form)
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


def _without_nulls(name: str, value: Any) -> Any:
    """A field's value; null in a message or a format is the same as leaving the key out."""
    if name == "messages" and isinstance(value, list):
        return [_without_nulls("message", message) for message in value]
    if name in ("message", "response_format", "json_schema") and isinstance(value, Mapping):
        return {key: _without_nulls(key, inner) for key, inner in value.items() if inner is not None}
    return value


def _wrong(error: ValidationError, given: Mapping[str, Any], form: type[Body]) -> list[Problem]:
    """What pydantic found, in sentences of our own: one a field, or one a message's field."""
    found: dict[str, Problem] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        name, *inner = one["loc"]
        field = str(name)
        if field == "messages" and inner:
            param, sentence = _wrong_message(given["messages"], inner, one["type"])
        else:
            param = field
            sentence = f"{field} is {shown(given[field])}; it must be {form.model_fields[field].description}"
        found.setdefault(param, (param, "invalid_value", sentence))
    return list(found.values())


def _wrong_message(messages: list[Any], inner: list[int | str], kind: str) -> tuple[str, str]:
    """A message's field, and what is wrong with it. inner: where, from the message's number on."""
    number = int(inner[0])
    place, message = f"messages[{number}]", messages[number]
    if len(inner) == 1:
        return place, f'{place} is {shown(message)}; it must be a message {{"role": "user", "content": "…"}}'
    field = str(inner[1])
    param = f"{place}.{field}"
    if kind == "extra_forbidden":
        return param, f"{place} has the field {shown(field)}, which is not supported; keep its role and its content"
    what = f"it must be {Message.model_fields[field].description}"
    if field not in message:
        return param, f"{place} has no {field}; {what}"
    return param, f"{param} is {shown(message[field])}; {what}"
