"""Checks the JSON of a request and returns its body, or an error with one sentence per problem.

A body may be as large as the server allows, so the checks bound their work. Lists and objects are counted before their
members are read. A list is given up at the first wrong member. Messages and tools are checked one by one, until there
are enough problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from inlay.api.failures import MAX_NAME, MAX_PROBLEMS, BodyError
from inlay.api.openai.bodies import (
    LARGEST,
    LONGEST,
    MAX_PROMPTS,
    MAX_TAGS,
    NO_EFFECT,
    UNSUPPORTED,
    Body,
    ChatBody,
    CompletionBody,
    Endpoint,
    Tool,
)
from inlay.api.openai.foreign import IGNORED
from inlay.api.openai.messages import (
    MAX_PARTS,
    Message,
    PastAnswer,
    Problem,
    StrictForm,
    form_of,
    problems_of,
    wrong_part,
)
from inlay.api.values import MAX_FIELDS, check_values
from inlay.wording import clip, shown

_FORMS: dict[Endpoint, type[Body]] = {Endpoint.CHAT: ChatBody, Endpoint.COMPLETIONS: CompletionBody}
_LONGEST_GUESSED = 60  # characters; longer names are not compared with known ones

#: Fields that are lists of objects. An error in a member has its number.
_MEMBERS: dict[str, tuple[type[StrictForm], str, str]] = {
    "messages": (Message, "message", 'a message {"role": "user", "content": "…"}'),
    "tools": (Tool, "tool", 'a tool {"type": "function", "function": {…}}'),
}

#: Objects with known fields: for each kind, the keys that hold other kinds. In these objects, null means absent.
_KINDS: dict[str, dict[str, str]] = {
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
}


def read_body(raw: Any, endpoint: str) -> Body:
    """Check a request and return its body, without the fields that have no effect.

    Raises BodyError, which names up to MAX_PROBLEMS problems.
    """
    if not isinstance(raw, Mapping):
        raise BodyError(f"the body is {shown(raw)}; it must be an object")
    if len(raw) > MAX_FIELDS:
        raise BodyError(f"the body has {len(raw):,} fields; it may have at most {MAX_FIELDS}, so leave out the others")
    given = {str(name): value for name, value in raw.items() if value is not None and name not in NO_EFFECT}
    ignored, given = _without_ignored(given)
    for name, value in given.items():
        most = MAX_TAGS if name == "prompt" and isinstance(value, Mapping) else LARGEST.get(name)
        check_values(name, value, most)
    form = _FORMS[Endpoint(endpoint)]
    problems = _unsupported(given, form, endpoint)
    kept = {name: value for name, value in given.items() if name in form.model_fields}
    problems += _too_long(kept, form)
    kept = {name: _without_nulls(name, name, value) for name, value in kept.items()}
    members = {name: kept.pop(name) for name in _MEMBERS if isinstance(kept.get(name), list)}
    body = None
    try:
        body = form.model_validate(kept)
    except ValidationError as error:
        problems += _wrong(error, kept, form)
    made = {name: _members(name, value, problems) for name, value in members.items()}
    if isinstance(body, ChatBody) and not problems:
        problems += problems_of(made.get("messages", ()))  # type: ignore[arg-type]
    if problems or body is None:
        raise _all_of(problems)
    body = body.model_copy(update=made) if made else body
    body._ignored = ignored
    return body


def _without_ignored(given: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the sorted names of the ignored fields, and the other fields.

    Ollama's ``options`` is ignored if all of its fields are.
    """
    ignored = [name for name in given if name in IGNORED]
    options = given.get("options")
    if isinstance(options, Mapping) and options and options.keys() <= IGNORED.keys():
        ignored.append("options")
    return tuple(sorted(ignored)), {name: value for name, value in given.items() if name not in ignored}


def _all_of(problems: list[Problem]) -> BodyError:
    """Return one error for all problems, up to a limit."""
    param, code, _ = problems[0]
    sentences = [sentence for _, _, sentence in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        sentences.append("there are more errors; correct these first")
    return BodyError(". Also: ".join(sentences), param=param, code=code)


def _unsupported(given: Mapping[str, Any], form: type[Body], endpoint: str) -> list[Problem]:
    """Return the problems of fields that this endpoint does not accept."""
    problems: list[Problem] = []
    for name, value in given.items():
        if name in form.model_fields or len(problems) > MAX_PROBLEMS:
            continue
        if name in UNSUPPORTED:
            harmless, remedy = UNSUPPORTED[name]
            if name == "best_of":
                harmless = (*harmless, given.get("n", 1))  # n answers are requested, so the best n of n are all of them
            if not any(value == one and type(value) is type(one) for one in harmless):
                problems.append((name, "unsupported_field", f"{name} is not supported: {remedy}"))
            continue
        near = _nearest(name, form)
        remedy = f"did you mean {near}?" if near else "leave it out"
        problems.append((name, "unknown_field", f"{endpoint} takes no field {shown(name)}; {remedy}"))
    return problems


def _nearest(name: str, form: type[Body]) -> str | None:
    """Return the accepted field with the nearest name; None if no name is near."""
    known = (*form.model_fields, *NO_EFFECT, *IGNORED)
    near = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_GUESSED else ()
    return near[0] if near else None


def _too_long(kept: dict[str, Any], form: type[Body]) -> list[Problem]:
    """Return the problems of fields with too many members, and remove them, so that their members are not checked."""
    problems: list[Problem] = []
    for name, most in LONGEST.items():
        if isinstance(kept.get(name), list | Mapping) and len(kept[name]) > most:
            problems.append((name, "invalid_value", _must_be(name, kept.pop(name), form)))
    prompt = kept.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        del kept["prompt"]
        sentence = f"prompt is {shown(prompt)}; one request takes at most {MAX_PROMPTS:,} prompts"
        problems.append(("prompt", "invalid_value", sentence))
    return problems


def _without_nulls(field: str, kind: str, value: Any) -> Any:
    """Return a field's value without null keys, for objects that _KINDS lists.

    Args:
        field: the name of the field.
        kind: the kind of its objects.
        value: the value.
    """
    if kind not in _KINDS:
        return value
    if isinstance(value, list):
        return [_without_nulls(field, kind, member) for member in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_FIELDS:
        message = f"{field} holds an object of {len(value):,} fields; it may have at most {MAX_FIELDS}"
        raise BodyError(f"{message}, so leave out the others", param=field)
    inner_kinds = _KINDS[kind]
    return {
        key: _without_nulls(field, inner_kinds[key], inner) if key in inner_kinds else inner
        for key, inner in value.items()
        if inner is not None
    }


def _members(name: str, given: list[Any], problems: list[Problem]) -> list[StrictForm]:
    """Return the parsed members of a list. Their errors are added to the problems, until there are enough."""
    made = []
    for number, member in enumerate(given):
        try:
            form = form_of(member) if name == "messages" else _MEMBERS[name][0]
            made.append(form.model_validate(member))
        except ValidationError as error:
            problems += _wrong_member(error, name, number, member, form)
            if len(problems) > MAX_PROBLEMS:
                break
    return made


def _wrong(error: ValidationError, given: Mapping[str, Any], form: type[Body]) -> list[Problem]:
    """Return pydantic's errors as inlay's sentences, one per field."""
    fields = dict.fromkeys(str(one["loc"][0]) for one in error.errors(include_url=False, include_input=False))
    return [(field, "invalid_value", _must_be(field, given[field], form)) for field in fields]


def _must_be(field: str, value: Any, form: type[Body]) -> str:
    return f"{field} is {shown(value)}; it must be {form.model_fields[field].description}"


def _wrong_part(param: str, content: Any, inner: Sequence[str], form: type[StrictForm]) -> Problem | None:
    """Return the problem of a content part; None if the problem is elsewhere. ``inner`` is pydantic's path to it."""
    number = next((int(name) for name in inner if name.isdigit()), None)
    if not isinstance(content, list) or number is None or len(content) > MAX_PARTS:
        return None
    return wrong_part(content[number], f"{param}[{number}]", past_answer=form is PastAnswer)


def _wrong_member(error: ValidationError, name: str, number: int, member: Any, form: type[StrictForm]) -> list[Problem]:
    """Return pydantic's errors for one member of a list, one per field."""
    _, called, example = _MEMBERS[name]
    place = f"{name}[{number}]"
    if not isinstance(member, Mapping):
        return [(place, "invalid_value", f"{place} is {shown(member)}; it must be {example}")]
    found: dict[str, Problem] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        field, *inner = map(str, one["loc"])
        param = f"{place}.{clip(field, MAX_NAME)}"
        part = _wrong_part(param, member[field], inner, form) if name == "messages" and field == "content" else None
        if part is not None:
            found[param] = part  # replaces the problem of the list around it
            continue
        if one["type"] == "extra_forbidden" and not inner:
            known = ", ".join(form.model_fields)
            said = f"{place} has the field {shown(field)}, which is not supported; a {called} has {known}"
        elif field in member:
            said = f"{param} is {shown(member[field])}; it must be {form.model_fields[field].description}"
        else:
            said = f"{place} has no {field}; it must be {form.model_fields[field].description}"
        found.setdefault(param, (param, "invalid_value", said))
    return list(found.values())
