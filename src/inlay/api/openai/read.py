"""JSON → the body of a request, or a sentence for everything that is wrong with it, up to a number of things.

Bodies are as large as a server lets them be, so nothing here looks at all of one before it knows how much there is:
lists and objects are counted first, a list is given up at the first member that is wrong, and messages and tools, of
which each is told with what is wrong in it, when there is enough to tell.
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
    Form,
    Message,
    PastAnswer,
    Problem,
    form_of,
    problems_of,
    wrong_part,
)
from inlay.api.values import MAX_FIELDS, check_values
from inlay.wording import clip, shown

_FORMS: dict[Endpoint, type[Body]] = {Endpoint.CHAT: ChatBody, Endpoint.COMPLETIONS: CompletionBody}
_LONGEST_GUESSED = 60  # characters of a name that others are compared with

#: Fields that are lists of objects: what is wrong in one of these is told with its number.
_MEMBERS: dict[str, tuple[type[Form], str, str]] = {
    "messages": (Message, "message", 'a message {"role": "user", "content": "…"}'),
    "tools": (Tool, "tool", 'a tool {"type": "function", "function": {…}}'),
}

#: Objects whose fields are known: for each kind, its keys that hold other kinds. In them, null is the same as nothing.
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
    """The body of a request; the fields that have no effect are gone. Raises BodyError, which names every problem.

    Of many problems, it names the first MAX_PROBLEMS.
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
    """The names of fields that are ignored, in order, and the other fields.

    Ollama's ``options`` is ignored if all of its fields are.
    """
    ignored = [name for name in given if name in IGNORED]
    options = given.get("options")
    if isinstance(options, Mapping) and options and options.keys() <= IGNORED.keys():
        ignored.append("options")
    return tuple(sorted(ignored)), {name: value for name, value in given.items() if name not in ignored}


def _all_of(problems: list[Problem]) -> BodyError:
    """One error that tells all of these, or the first of them."""
    param, code, _ = problems[0]
    sentences = [sentence for _, _, sentence in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        sentences.append("there is more; correct these first")
    return BodyError(". Also: ".join(sentences), param=param, code=code)


def _unsupported(given: Mapping[str, Any], form: type[Body], endpoint: str) -> list[Problem]:
    """The fields that this endpoint does not take."""
    problems: list[Problem] = []
    for name, value in given.items():
        if name in form.model_fields or len(problems) > MAX_PROBLEMS:
            continue
        if name in UNSUPPORTED:
            harmless, remedy = UNSUPPORTED[name]
            if name == "best_of":
                harmless = (*harmless, given.get("n", 1))  # the best of as many as are asked for are all of them
            if not any(value == one and type(value) is type(one) for one in harmless):
                problems.append((name, "unsupported_field", f"{name} is not supported: {remedy}"))
            continue
        near = _nearest(name, form)
        remedy = f"did you mean {near}?" if near else "leave it out"
        problems.append((name, "unknown_field", f"{endpoint} takes no field {shown(name)}; {remedy}"))
    return problems


def _nearest(name: str, form: type[Body]) -> str | None:
    """The field that is accepted and whose name is nearest to an unknown one; None where none is near."""
    known = (*form.model_fields, *NO_EFFECT, *IGNORED)
    near = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_GUESSED else ()
    return near[0] if near else None


def _too_long(kept: dict[str, Any], form: type[Body]) -> list[Problem]:
    """The fields that have more members than they may, which are then taken out: nobody looks at their members."""
    problems: list[Problem] = []
    for name, most in LONGEST.items():
        if isinstance(kept.get(name), list | Mapping) and len(kept[name]) > most:
            problems.append((name, "invalid_value", _must_be(name, kept.pop(name), form)))
    prompt = kept.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        del kept["prompt"]
        sentence = f"prompt is {shown(prompt)}; of prompts, one request takes at most {MAX_PROMPTS:,}"
        problems.append(("prompt", "invalid_value", sentence))
    return problems


def _without_nulls(field: str, kind: str, value: Any) -> Any:
    """A field's value; null where _KINDS says so is the same as leaving the key out. kind: of the objects in it."""
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


def _members(name: str, given: list[Any], problems: list[Problem]) -> list[Form]:
    """The members of a list of objects. What is wrong with them joins the problems, until there are enough."""
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
    """What pydantic found, in sentences of our own: one a field."""
    fields = dict.fromkeys(str(one["loc"][0]) for one in error.errors(include_url=False, include_input=False))
    return [(field, "invalid_value", _must_be(field, given[field], form)) for field in fields]


def _must_be(field: str, value: Any, form: type[Body]) -> str:
    return f"{field} is {shown(value)}; it must be {form.model_fields[field].description}"


def _wrong_part(param: str, content: Any, inner: Sequence[str], form: type[Form]) -> Problem | None:
    """The problem of a part of a content, or None for another problem. inner: pydantic's way to the problem."""
    number = next((int(name) for name in inner if name.isdigit()), None)
    if not isinstance(content, list) or number is None or len(content) > MAX_PARTS:
        return None
    return wrong_part(content[number], f"{param}[{number}]", past_answer=form is PastAnswer)


def _wrong_member(error: ValidationError, name: str, number: int, member: Any, form: type[Form]) -> list[Problem]:
    """What pydantic found in one member of a list: one sentence a field of it."""
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
            found[param] = part  # in place of what is said of the list around it
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
