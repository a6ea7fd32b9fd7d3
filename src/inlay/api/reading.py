"""Checks the JSON of a request by a dialect's rules, and returns its body or an error with one sentence per problem.

A body may be as large as the server allows, so the checks bound their work. Lists and objects are counted before their
members are read. A list is given up at the first wrong member. Messages and tools are checked one by one, until there
are enough problems. Lists of numbers are checked in pieces, with one comparison of types each: a body may hold a
million token ids, and other threads can run between two pieces.

``StrictForm`` is the base of all objects in bodies. ``RequestForm`` has the fields of every dialect's body: sampling
and inlay's own. An error for a wrong value quotes the description of its field. ``null`` means absent in all dialects,
and is removed before these models check a body.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.json_schema import models_json_schema

from inlay.api.failures import MAX_NAME, MAX_PROBLEMS, NO_TEXT, BodyError, not_an_object
from inlay.policy import KEY, POSITIONS, WORDS, PolicyFields
from inlay.wording import clip, lone_surrogate, shown

MAX_ID = 256  # characters
MAX_TOOLS = 128
MAX_PARTS = 1_024  # of one message
MAX_MESSAGES = 8_192
MAX_STOP = 1_024  # characters of one stop string
MAX_STOPS = 64  # each is searched for after every token
MAX_LOGPROBS = 20
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
NAMED = "letters, digits, _, . and -, at most 64 of them"
WHOLE = "a whole number"
NUMBER = "a number"
SWITCH = "true or false"
TEXT = "a text"
POSITIVE = "a whole number of at least 1"
#: Fields that are lists or objects → the most members. Checked before the members.
LONGEST = {
    "allowed_token_ids": 262_144,
    "bad_words": 256,
    "logit_bias": 16_384,
    "stop_token_ids": 4_096,
    "tools": MAX_TOOLS,
}
#: The form of a mark, by field.
MARKS = {
    "cache_control": '{"type": "ephemeral"}, with or without "ttl": "5m"',
    "prompt_cache_breakpoint": '{"mode": "explicit"}, with or without "ttl": "30m" or "12h"',
}


class StrictForm(BaseModel):
    """Base of all objects: it rejects unknown keys and converts nothing.

    ``inside`` maps a field that holds objects, or a list of objects, to their forms by ``type``. Errors in such objects
    are located by it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    inside: ClassVar[PartForms] = MappingProxyType({})


#: A field that holds objects → their forms by ``type``.
PartForms = Mapping[str, Mapping[str, type[StrictForm]]]


class CacheControl(StrictForm):
    """Marks a part of a message to keep in the cache, at most for ``ttl``, until the memory is needed."""

    type: Literal["ephemeral"]
    ttl: Annotated[str, Field(max_length=32)] | None = None

    @property
    def mark(self) -> dict[str, Any]:
        """The mark in the form of prompts."""
        return self.model_dump(exclude_none=True)


def _numbers(value: Any) -> Any:
    """Return an object of numbers unchanged. Raises ValueError for any other value in it."""
    if isinstance(value, dict) and not all(type(one) in (int, float) for one in value.values()):
        raise ValueError("not a number")
    return value


class RequestForm(StrictForm):
    """The base of all bodies. ``example`` is a body for messages."""

    example: ClassVar[str] = '{"model": "…"}'

    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """The request's fields of other servers that have no meaning here."""
        return self._ignored

    model: str | None = Field(None, description=TEXT)


class CommonBody(RequestForm):
    """The fields of every body that asks for answers."""

    seed: int | None = Field(None, description=f"{WHOLE} of 64 bits", ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, description=NUMBER)
    top_p: float | None = Field(None, description=NUMBER)
    presence_penalty: float | None = Field(None, description=NUMBER)
    frequency_penalty: float | None = Field(None, description=NUMBER)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers)] | None = Field(
        None, description=f"an object of token ids and numbers, at most {LONGEST['logit_bias']:,}"
    )
    stream: bool | None = Field(None, description=SWITCH)
    # vLLM's
    top_k: int | None = Field(None, description=f"{WHOLE} from -1 to {2**31 - 1}", ge=-1, lt=2**31)
    min_p: float | None = Field(None, description=NUMBER)
    typical_p: float | None = Field(None, description=NUMBER)
    repetition_penalty: float | None = Field(None, description=f"{NUMBER} from 0.01 to 100", ge=0.01, le=100)
    min_tokens: int | None = Field(None, description=WHOLE)
    ignore_eos: bool | None = Field(None, description=SWITCH)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=LONGEST["stop_token_ids"])] | None = Field(
        None, description=f"a list of token ids, at most {LONGEST['stop_token_ids']:,}"
    )
    skip_special_tokens: bool | None = Field(None, description=SWITCH)
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=LONGEST["bad_words"])] | None = Field(
        None, description=f"a list of texts, at most {LONGEST['bad_words']}"
    )
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=LONGEST["allowed_token_ids"])] | None = (
        Field(None, description=f"a list of token ids, at most {LONGEST['allowed_token_ids']:,}")
    )
    truncate_prompt_tokens: int | None = Field(None, description=f"{WHOLE} of at least 1, or -1", ge=-1)
    priority: int | None = Field(None, description=f"{WHOLE} of 32 bits; lower goes first", ge=-(2**31), lt=2**31)
    # inlay's own
    reuse: str | None = Field(None, description=PolicyFields.help("reuse"))
    recompute: str | None = Field(None, description=PolicyFields.help("recompute"))
    promote: bool | None = Field(None, description=f"{SWITCH}; {PolicyFields.help('promote')}")
    across_adapters: bool | None = Field(None, description=f"{SWITCH}; {PolicyFields.help('across_adapters')}")
    tolerance: float | str | None = Field(None, description=PolicyFields.help("tolerance"))
    find: str | None = Field(None, description=PolicyFields.help("find"))
    positions: str | None = Field(None, description="schema or packed")
    order: Literal["any"] | None = Field(
        None, description='"any" where neighbouring modules, or marked parts of a message, may change places'
    )
    diagnostics: bool | None = Field(None, description=f"{SWITCH}; if true, the answer says why tokens were computed")


STRING = {"type": "string"}
INTEGER = {"type": "integer", "minimum": 0}


def of_object(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of an object that requires these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def described(
    bodies: Sequence[type[CommonBody]],
    names: Sequence[str],
    *,
    no_effect: Iterable[str],
    ignored: Mapping[str, str],
    prefix: str = "",
    others: Iterable[type[StrictForm]] = (),
) -> dict[str, Any]:
    """Return the schemas of bodies and their parts, by name.

    The bodies include the fields without effect and the served model's names.

    Args:
        bodies: the forms of bodies.
        names: of the served model.
        no_effect: accepted fields without effect.
        ignored: ignored fields → the servers that have them.
        prefix: of the schemas' names, because dialects have forms of the same name.
        others: forms that the bodies do not mention.
    """
    ref = f"#/components/schemas/{prefix}{{model}}"
    _, made = models_json_schema([(form, "validation") for form in (*bodies, *others)], ref_template=ref)
    words = {"model": names, "reuse": WORDS, "positions": POSITIONS}
    schemas: dict[str, Any] = made["$defs"]
    for body in bodies:
        fields = schemas[body.__name__]["properties"]
        fields.update({field: {"description": "Accepted, and without effect."} for field in no_effect})
        foreign = {name: known for name, known in ignored.items() if name not in fields}
        fields.update({name: {"description": f"Of {known}; ignored."} for name, known in foreign.items()})
        for name, allowed in words.items():
            fields[name]["anyOf"] = [{"enum": list(allowed)}, {"type": "null"}]
        fields["reuse"]["anyOf"].append({"type": "string", "pattern": KEY})
    return {f"{prefix}{name}": schema for name, schema in schemas.items()}


MAX_NESTING = 128  # lists and objects, with the body's own
MAX_FIELDS = 256  # of a body, and of each object in it with known fields
_PIECE = 2**15  # members of a list that are checked together


def all_are(kind: type, values: Sequence[Any]) -> bool:
    """True if all values have exactly this type. Stops after the first piece with another type."""
    return all(kinds == {kind} for kinds in map(_kinds, _pieces(values)))


def walk(value: Any) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield the depth and members of every list and object in a value, in pieces. Keys of objects are included."""
    level, depth = [[value]], 1
    while level:
        inside: list[Any] = []
        for container in level:
            lists = (list(container), list(container.values())) if isinstance(container, dict) else (container,)
            for piece in (piece for members in lists for piece in _pieces(members)):
                yield depth, piece
                if _kinds(piece) & {dict, list}:
                    inside += (one for one in piece if isinstance(one, dict | list))
        level, depth = inside, depth + 1


def check_values(name: str, value: Any, most: int | None = None) -> None:
    """Raise BodyError for lone surrogates, NaN, Infinity, or too deep nesting in a field.

    Args:
        name: the field's name.
        value: its value.
        most: the most values that the field may hold; None for no limit.
    """
    if problem := lone_surrogate(name):
        raise BodyError(f"the name of a field holds {problem}")
    said, count = clip(name, MAX_NAME), 0
    for depth, piece in walk(value):
        count += len(piece)
        if most is not None and count > most:
            raise BodyError(f"{said} holds more than {most:,} values; leave some of them out", param=name)
        if depth > MAX_NESTING:
            raise BodyError(f"{said} nests lists and objects too deeply; nest them less deeply", param=name)
        if problem := _half_character(piece):
            raise BodyError(f"{said} holds {problem}", param=name)
        if float in _kinds(piece) and not all(math.isfinite(one) for one in piece if isinstance(one, float)):
            raise BodyError(f"{said} holds NaN or Infinity, which are not JSON values; write a number", param=name)


def _half_character(piece: Sequence[Any]) -> str | None:
    if str not in _kinds(piece):
        return None
    texts = (one for one in piece if isinstance(one, str) and not one.isascii())
    return next((problem for text in texts if (problem := lone_surrogate(text))), None)


def _kinds(piece: Sequence[Any]) -> set[type]:
    return set(map(type, piece))


def _pieces(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[start : start + _PIECE] for start in range(0, len(values), _PIECE))


Problem = tuple[str | None, str | None, str]  # field, code, sentence
_LONGEST_GUESSED = 60  # characters; longer names are not compared with known ones
_NEAR = 0.8  # the least similarity of an ignored field
#: Ends of the types of parts with other content than text, such as "image_url" and "input_audio".
_MEDIA = ("image", "image_url", "audio", "audio_url", "video", "video_url", "file")


@dataclass(frozen=True, slots=True)
class Members:
    """A field that is a list of objects. An error in a member has its number.

    Args:
        form_of: returns the form of a member.
        noun: the name of a member.
        example: a description of a member.
    """

    form_of: Callable[[Any], type[StrictForm]]
    noun: str
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyRules:
    """The rules of a dialect for the bodies of its requests.

    Args:
        forms: path → the form of its bodies.
        no_effect: accepted fields that change no answer.
        ignored: fields of other servers that have no meaning here.
        unsupported: field → accepted neutral values, and the remedy for others.
        longest: fields that are lists or objects → the most members.
        largest: fields that hold documents → the most values in them, at any depth.
        members: fields that are lists of objects.
        kinds: objects with known fields. For each kind, the keys that hold other kinds. In these objects, null means
            absent.
        refused: types of parts that other servers read → the remedy.
        text_only: the remedy for a part of an unknown type.
    """

    forms: Mapping[str, type[RequestForm]]
    no_effect: Sequence[str]
    ignored: Mapping[str, str]
    unsupported: Mapping[str, tuple[tuple[Any, ...], str]]
    longest: Mapping[str, int]
    largest: Mapping[str, int]
    members: Mapping[str, Members]
    kinds: Mapping[str, Mapping[str, str]]
    refused: Mapping[str, str] = field(default_factory=dict)
    text_only: str = 'it must be "text": inlay reads text alone'


def read_fields(raw: Any, endpoint: str, rules: BodyRules) -> tuple[RequestForm | None, list[Problem]]:
    """Check the fields of a request. Fields that have no effect are left out.

    Returns:
        The body, or None if it cannot be made; and the problems.

    Raises:
        BodyError: the body is no object, or too large to look for all problems.
    """
    if not isinstance(raw, Mapping):
        raise not_an_object(raw, rules.forms[endpoint].example)
    if len(raw) > MAX_FIELDS:
        raise BodyError(f"the body has {len(raw):,} fields; it may have at most {MAX_FIELDS}, so leave out the others")
    form = rules.forms[endpoint]
    given = {str(name): value for name, value in raw.items() if value is not None and name not in rules.no_effect}
    ignored, given = _without_ignored(given, rules, form)
    for name, value in given.items():
        check_values(name, value, rules.largest.get(name))
    problems = _unsupported(given, form, endpoint, rules)
    kept = {name: value for name, value in given.items() if name in form.model_fields}
    problems += _too_long(kept, form, rules)
    kept = {name: _without_nulls(name, name, value, rules.kinds) for name, value in kept.items()}
    members = {name: kept.pop(name) for name in rules.members if isinstance(kept.get(name), list)}
    body = None
    try:
        body = form.model_validate(kept)
    except ValidationError as error:
        named = {field for field, _, _ in problems}  # a list that is too long was taken out, so it seems to be missing
        problems += [each for each in _wrong(error, kept, form, rules, members) if each[0] not in named]
    made = {name: _members(name, value, problems, rules) for name, value in members.items()}
    if body is not None:
        body = body.model_copy(update=made) if made else body
        body._ignored = ignored
    return body, problems


def all_of(problems: Sequence[Problem]) -> BodyError:
    """Return one error that lists the problems, at most MAX_PROBLEMS of them."""
    param, code, _ = problems[0]
    sentences = [sentence for _, _, sentence in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        sentences.append("there are more errors; correct these first")
    return BodyError(". Also: ".join(sentences), param=param, code=code)


def _without_ignored(
    given: dict[str, Any], rules: BodyRules, form: type[StrictForm]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the sorted names of the ignored fields, and the other fields.

    Ollama's ``options`` is ignored if all of its fields are.
    """
    ignored = [name for name in given if name in rules.ignored and name not in form.model_fields]
    options = given.get("options")
    if isinstance(options, Mapping) and options and options.keys() <= rules.ignored.keys():
        ignored.append("options")
    return tuple(sorted(ignored)), {name: value for name, value in given.items() if name not in ignored}


def _unsupported(given: Mapping[str, Any], form: type[StrictForm], endpoint: str, rules: BodyRules) -> list[Problem]:
    """Return the problems of fields that this endpoint does not accept."""
    problems: list[Problem] = []
    for name, value in given.items():
        if name in form.model_fields or len(problems) > MAX_PROBLEMS:
            continue
        if name in rules.unsupported:
            harmless, remedy = rules.unsupported[name]
            if name == "best_of":
                harmless = (*harmless, given.get("n", 1))  # n answers are requested, so the best n of n are all of them
            if not any(value == one and type(value) is type(one) for one in harmless):
                problems.append((name, "unsupported_field", f"{name} is not supported: {remedy}"))
            continue
        near = _nearest(name, form, rules)
        remedy = f"did you mean {near}?" if near else "leave it out"
        problems.append((name, "unknown_field", f"{endpoint} takes no field {shown(name)}; {remedy}"))
    return problems


def _nearest(name: str, form: type[StrictForm], rules: BodyRules) -> str | None:
    """Return the field with the nearest name; None if no name is near. An ignored field must be very near."""
    known = (*form.model_fields, *rules.no_effect, *rules.ignored)
    near = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_GUESSED else ()
    if not near or (near[0] in rules.ignored and SequenceMatcher(None, name, near[0]).ratio() < _NEAR):
        return None
    return near[0]


def _too_long(kept: dict[str, Any], form: type[StrictForm], rules: BodyRules) -> list[Problem]:
    """Return the problems of fields with too many members, and remove them, so that their members are not checked."""
    problems: list[Problem] = []
    for name, most in rules.longest.items():
        if isinstance(kept.get(name), list | Mapping) and len(kept[name]) > most:
            problems.append((name, "invalid_value", _must_be(name, kept.pop(name), form)))
    return problems


def _without_nulls(field: str, kind: str, value: Any, kinds: Mapping[str, Mapping[str, str]]) -> Any:
    """Return a field's value without null keys, for objects that ``kinds`` lists.

    Args:
        field: the name of the field.
        kind: the kind of its objects.
        value: the value.
        kinds: see BodyRules.
    """
    if kind not in kinds:
        return value
    if isinstance(value, list):
        return [_without_nulls(field, kind, member, kinds) for member in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_FIELDS:
        message = f"{field} holds an object of {len(value):,} fields; it may have at most {MAX_FIELDS}"
        raise BodyError(f"{message}, so leave out the others", param=field)
    inner_kinds = kinds[kind]
    return {
        key: _without_nulls(field, inner_kinds[key], inner, kinds) if key in inner_kinds else inner
        for key, inner in value.items()
        if inner is not None
    }


def _members(name: str, given: list[Any], problems: list[Problem], rules: BodyRules) -> list[StrictForm]:
    """Return the parsed members of a list. Their errors are added to the problems, until there are enough."""
    made, members = [], rules.members[name]
    for number, member in enumerate(given):
        form = members.form_of(member)
        try:
            made.append(form.model_validate(member))
        except ValidationError as error:
            problems += _wrong_member(error, f"{name}[{number}]", member, form, members, rules)
            if len(problems) > MAX_PROBLEMS:
                break
    return made


def _wrong(
    error: ValidationError,
    given: Mapping[str, Any],
    form: type[StrictForm],
    rules: BodyRules,
    members: Mapping[str, Any],
) -> list[Problem]:
    """Return pydantic's errors as inlay's sentences, one per field. Fields among the members are read elsewhere."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    deepest: dict[str, tuple[int, str]] = {}  # field → the depth of its deepest error, and the sentence about it
    for one in found:
        field, *inner = one["loc"]
        field = str(field)
        if field in members:
            continue
        wanted = form.model_fields[field].description
        if field not in given:
            deepest[field] = 0, f"{field} is missing; it must be {wanted}"
            continue
        place, value, depth = _located(field, given[field], inner)
        said = shown(value)
        if one["type"] == "missing":
            place, said, depth = f"{place}.{inner[-1]}", "missing", depth + 1
        if depth > deepest.get(field, (-1, ""))[0]:
            deepest[field] = depth, f"{place} is {said}; {field if depth else 'it'} must be {wanted}"
    return [
        (field, "invalid_value" if field in given else "missing_field", sentence)
        for field, (_, sentence) in deepest.items()
    ]


def _located(place: str, value: Any, inner: Sequence[str | int]) -> tuple[str, Any, int]:
    """Follow pydantic's path into a value. Returns the place, the value there, and the depth.

    Steps of the path that name the type of a union are skipped, because they are no keys of the value.
    """
    depth = 0
    for name in inner:
        if isinstance(value, list) and isinstance(name, int) and name < len(value):
            place, value = f"{place}[{name}]", value[name]
        elif isinstance(value, Mapping) and name in value:
            place, value = f"{place}.{clip(str(name), MAX_NAME)}", value[name]
        else:
            continue
        depth += 1
    return place, value, depth


def _must_be(field: str, value: Any, form: type[StrictForm]) -> str:
    return f"{field} is {shown(value)}; it must be {form.model_fields[field].description}"


def _wrong_member(
    error: ValidationError, place: str, member: Any, form: type[StrictForm], members: Members, rules: BodyRules
) -> list[Problem]:
    """Return pydantic's errors for one member of a list, one per field."""
    if not isinstance(member, Mapping):
        return [(place, "invalid_value", f"{place} is {shown(member)}; it must be {members.example}")]
    found: dict[str, Problem] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        field, *inner = map(str, one["loc"])
        param = f"{place}.{clip(field, MAX_NAME)}"
        part = _wrong_inside(param, member.get(field), inner, form.inside.get(field), rules)
        if part is not None:
            found[param] = part  # replaces the problem of the list around it
            continue
        if one["type"] == "extra_forbidden" and not inner:
            known = ", ".join(form.model_fields)
            said = f"{place} has the field {shown(field)}, which is not supported; a {members.noun} has {known}"
        elif field in member:
            said = f"{param} is {shown(member[field])}; it must be {form.model_fields[field].description}"
        else:
            said = f"{place} has no {field}; it must be {form.model_fields[field].description}"
        found.setdefault(param, (param, "invalid_value", said))
    return list(found.values())


def _wrong_inside(
    place: str, value: Any, inner: Sequence[str], forms: Mapping[str, type[StrictForm]] | None, rules: BodyRules
) -> Problem | None:
    """Return the problem of an object in a field; None if the problem is the field. ``inner`` is pydantic's path."""
    if forms is None:
        return None
    if not isinstance(value, list):
        return wrong_part(value, place, forms, rules) if isinstance(value, Mapping) else None
    number = next((int(name) for name in inner if name.isdigit()), None)
    if number is None or not number < len(value) <= MAX_PARTS:
        return None
    return wrong_part(value[number], f"{place}[{number}]", forms, rules)


def wrong_part(part: Any, place: str, forms: Mapping[str, type[StrictForm]], rules: BodyRules) -> Problem | None:
    """Return the first problem of an object whose ``type`` decides its form, or None.

    Args:
        part: the object.
        place: the path to it.
        forms: type → form.
        rules: of the dialect.
    """
    if not isinstance(part, Mapping):
        example = '{"type": "text", "text": "…"}' if "text" in forms else f'{{"type": "{next(iter(forms))}", …}}'
        return place, "invalid_value", f"{place} is {shown(part)}; it must be a part {example}"
    kind = part.get("type")
    form = forms.get(kind) if isinstance(kind, str) else None
    if form is None:
        if isinstance(kind, str) and kind in rules.refused:
            said = f"{place} is of type {shown(kind)}, which is not supported: {rules.refused[kind]}"
            return f"{place}.type", NO_TEXT, said
        said = "is missing" if kind is None else f"is {shown(kind)}"
        remedy = rules.text_only if "text" in forms else f"it must be {' or '.join(map(repr, forms))}"
        code = NO_TEXT if isinstance(kind, str) and kind.endswith(_MEDIA) else "invalid_value"
        return f"{place}.type", code, f"{place}.type {said}; {remedy}"
    try:
        form.model_validate(part)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = errors[0]["loc"][0]
        # the error within a list says more than that the field is no text either
        deep = (one for one in errors if one["loc"][0] == first and any(isinstance(at, int) for at in one["loc"]))
        one = next(deep, errors[0])
        field, *inner = map(str, one["loc"])
    else:
        return None
    if one["type"] == "extra_forbidden" and not inner:
        known = ", ".join(form.model_fields)
        said = f"{place} has the field {shown(field)}, which is not supported; a part has {known}"
        return f"{place}.{clip(field, MAX_NAME)}", "invalid_value", said
    deeper = _wrong_inside(f"{place}.{field}", part.get(field), inner, form.inside.get(field), rules)
    if deeper is not None:
        return deeper
    value: Any = part.get(field)
    at = f"{place}.{clip(field, MAX_NAME)}"
    if not isinstance(value, Mapping):
        inner = []
    for name in inner:
        value, at = value.get(name) if isinstance(value, Mapping) else None, f"{at}.{clip(name, MAX_NAME)}"
    said = "is missing" if value is None else f"is {shown(value)}"
    wanted = form.model_fields[field].description
    remedy = f"write {field}: {wanted}" if inner else f"it must be {wanted}"
    return at, "invalid_value", f"{at} {said}; {remedy}"
