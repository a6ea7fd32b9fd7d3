"""The common part of both JSON readers: validation of one object at a time, limits and error messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.pml import nodes as limits
from inlay.pml.attributes import TAGS, is_in_namespace, objection
from inlay.pml.json_form import (
    Form,
    Import,
    ImportSet,
    Module,
    Param,
    Prompt,
    PromptTurn,
    Schema,
    ShortImport,
    ShortSet,
    Turn,
    Union,
)
from inlay.pml.nodes import ROLES, Meta
from inlay.pml.parser import place_at
from inlay.pml.problems import JSONPlace, Problems
from inlay.pml.scopes import names_of
from inlay.pml.sources import document_from_string
from inlay.strict_json import JSONError, JsonFault, Pairs, read_json, repeated
from inlay.wording import quote, shown

KINDS = ("module", "param", "union", "role", "import", "set")
"""The keys that give the kind of an object in ``content``. Each object has one of them."""

_MOST_TEXTS = 2 * limits.MAX_ELEMENTS  # the most that PML can have between its tags
_MOST_PROBLEMS = 1_000  # reading stops here, because more errors would not help
_CALLED: dict[type[Form], str] = {
    Schema: "a schema",
    Module: "a module",
    Param: "a parameter",
    Union: "a union",
    Turn: "a turn",
    Prompt: "a prompt",
    Import: "an import",
    ImportSet: "a set",
    ShortSet: "a set",
    PromptTurn: "a turn",
    ShortImport: "an import",
}
_VALUE = f"a text of at most {limits.MAX_ATTRIBUTE_CHARACTERS:,} characters"
_LABEL = f"the name of the schema, a text of 1 to {limits.MAX_ATTRIBUTE_CHARACTERS:,} characters"
_EXPECTED = {
    "name": _LABEL,
    "schema": _LABEL,
    "content": "a text, or a list of texts and objects",
    "scaffolds": "a list of lists of modules' names",
    "module": "a name",
    "src": "a text, the name of a file beside the schema",
    "param": "a name",
    "len": f"a whole number from 1 to {limits.MAX_PARAM_LENGTH:,}",
    "default": _VALUE,
    "scaffold": _VALUE,
    "cache": "true or false",
    "meta": "an object with a text for each name",
    "union": "a list of modules, at least one",
    "role": " or ".join(map(quote, ROLES)),
    "import": "a name",
    "arguments": "an object with a text for each parameter",
    "imports": 'a list of names of modules, and objects {"name": …}',
    "set": f'a list of objects {{"import": …}}, 1 to {limits.MAX_SET} of them',
    "text": "a text",
}
_EXPECTED_IN: dict[type[Form], dict[str, str]] = {
    ShortImport: {**_EXPECTED, "name": "a name"},
    ShortSet: {
        **_EXPECTED,
        "set": f'a list of names of modules, and objects {{"name": …}}, 1 to {limits.MAX_SET} of them',
    },
}

_DIGITS = 18  # longer integers become floats
_REMEDIES = {
    "Expecting property name enclosed in double quotes": (
        "a key in double quotation marks belongs here; write one, or delete the comma before it"
    ),
    "Expecting value": "a value belongs here; write one, or delete the comma before it",
    "Expecting ',' delimiter": "this value or its list or object does not end here; write a comma or close it",
    "Expecting ':' delimiter": 'a colon belongs here; write "key": value',
    "Illegal trailing comma before end of object": "nothing follows this comma; delete the comma",  # from Python 3.13
    "Illegal trailing comma before end of array": "nothing follows this comma; delete the comma",
    "Extra data": "something stands after the end of the document; keep one object and nothing after it",
    "Unterminated string starting at": "a string begins here and does not end; close it",
    "Invalid control character at": "a line break or control character stands in a string; write \\n or \\u00… for it",
    "Invalid \\escape": "no escape begins like this; write \\\\ for a backslash",
    "Invalid \\uXXXX escape": "this escape is not complete; write \\u and four hexadecimal digits",
}


class JSONObject(dict[str, Any]):
    """A JSON object. ``twice`` holds its duplicate keys."""

    twice: tuple[str, ...] = ()

    @classmethod
    def of(cls, pairs: Pairs) -> JSONObject:
        """Build an object from its keys and values."""
        made = cls(pairs)
        if len(made) < len(pairs):
            made.twice = repeated(pairs)
        return made


def document_from_json(document: str | bytes | Mapping[str, Any], source: str) -> bytes:
    """Return a document as UTF-8 text.

    Raises:
        PMLError: It is not UTF-8, or too large.
        ParameterError: It is of another type, or the mapping cannot be written as JSON.
    """
    if isinstance(document, Mapping):
        return document_from_string(_dumped(document), source)
    if isinstance(document, str):
        return document_from_string(document, source)
    if not isinstance(document, bytes | bytearray):
        kind = type(document).__name__
        raise ParameterError(
            f"from_json takes a str, bytes or a mapping, not {kind}; give a path to from_file",
            code="parameter.wrong_type",
        )
    try:
        return document_from_string(bytes(document).decode(), source)
    except UnicodeDecodeError as error:
        place = place_at(source, document[: error.start].decode())
        raise PMLError([Problem(place, "this is not UTF-8; encode it as UTF-8", code="pml.wrong_encoding")]) from None


def parse_json(data: bytes, source: str) -> Any:
    """Parse a document in UTF-8, with objects as JSONObject; raises PMLError."""
    start = data.lstrip()[:1]
    if start in (b"", b"<"):
        message = "this is PML, not JSON; read it with from_string, or from a file that does not end in .json"
        nothing = 'there is nothing here; write {"name": "…"} for a schema, or {"schema": "…"} for a prompt'
        raise PMLError([Problem(Place(source, 1, 1), message if start else nothing, code="pml.malformed_json")])
    try:
        return read_json(data, make_object=JSONObject.of, make_integer=_integer)
    except JSONError as error:
        raise PMLError(
            [Problem(Place(source, error.line, error.column), _sentence(error), code="pml.malformed_json")]
        ) from None


def _dumped(document: Mapping[str, Any]) -> str:
    # Writing the mapping as text applies the same rules to it: only JSON, no NaN, and a bounded size.
    try:
        return json.dumps(dict(document), default=_as_dict, ensure_ascii=True)
    except RecursionError:
        raise ParameterError(
            f"the mapping is nested more than {limits.MAX_DEPTH} deep; nest less deeply", code="parameter.too_deep"
        ) from None
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"the mapping is no JSON ({error}); use str, int, list, dict and None", code="parameter.not_json"
        ) from None


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds {type(value).__name__}")


def _integer(digits: str) -> int | float:
    # Python refuses to convert very long integers, and PML needs none
    return int(digits) if len(digits) <= _DIGITS else float(digits)


def _sentence(error: JSONError) -> str:
    if error.fault is JsonFault.SYNTAX:
        return _REMEDIES.get(error.detail, f"this is not JSON ({error.detail}); correct it")
    if error.fault is JsonFault.HALF:
        return f"{error.detail} alone is half a character; write both halves, or leave it out"
    if error.fault is JsonFault.CONSTANT:
        return f"{error.detail} is no value of JSON; write a number, or leave it out"
    return f"objects are nested more than {limits.MAX_DEPTH} deep; nest less deeply"


class StopError(Exception):
    """Ends the reading after a problem that has been reported."""


class JSONReader:
    """Validates objects one at a time and reports errors to ``problems``."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._reported = 0
        self._objects = 0
        self._texts = 0

    def add(self, place: Place, message: str, *, code: str) -> None:
        """Report a problem; raises StopError after _MOST_PROBLEMS of them."""
        self._problems.add(place, message, code=code)
        self._reported += 1
        if self._reported >= _MOST_PROBLEMS:
            raise StopError

    def check(self, raw: JSONObject, form: type[Form], place: JSONPlace, depth: int) -> None:
        """Report errors in the keys and values of an object, except in the members of its lists.

        Args:
            depth: The nesting depth of the object. The outermost object has depth 1.

        Raises:
            StopError: A limit is exceeded.
        """
        self.count_object(place)
        if depth > limits.MAX_DEPTH:
            self._stop(
                place, f"objects are nested more than {limits.MAX_DEPTH} deep; nest less deeply", code="pml.too_deep"
            )
        self._check_keys(raw, place)
        for key in ("arguments", "meta"):
            if isinstance(inner := raw.get(key), JSONObject):
                self._check_keys(inner, place.key(key))
        try:
            form.model_validate(raw)
        except ValidationError as error:
            self._report(error, raw, form, place)

    def members(self, raw: JSONObject, key: str, place: JSONPlace) -> Iterator[tuple[Any, JSONPlace]]:
        """Yield the members of a list with their places. A single text in ``content`` counts as a list of one."""
        value, place = raw.get(key), place.key(key)
        if isinstance(value, str) and key == "content":
            yield value, place
        elif isinstance(value, list):
            for index, member in enumerate(value):
                yield member, place.index(index)

    def kind(self, raw: Any, place: JSONPlace, takes: Iterable[str]) -> str | None:
        """Return the kind of an object, one of KINDS, or None after a problem. ``takes`` lists the allowed kinds."""
        if not isinstance(raw, JSONObject):
            self.add(place, f"this is {shown(raw, kind=True)}; write a text or an object", code="pml.wrong_type")
            return None
        kind = next((key for key in raw if key in KINDS), None)
        if kind is None:
            keys = ", ".join(quote(key) for key in KINDS if key in takes)
            near = next((near for key in raw if (near := self._problems.near(key, KINDS))), None)
            remedy = f"did you mean {quote(near)}?" if near else f"give it one of {keys}"
            if "text" in raw:
                remedy = "write a text as a string alone"
            self.add(place, f"this object does not say what it is; {remedy}", code="pml.unknown_object")
        return kind

    def count_object(self, place: JSONPlace) -> None:
        """Count an object or a scaffold; raises StopError if there are too many."""
        self._objects += 1
        if self._objects > limits.MAX_ELEMENTS:
            self._stop(
                place,
                f"there are more than {limits.MAX_ELEMENTS} objects; split this into several files",
                code="pml.too_large",
            )

    def count_text(self, place: JSONPlace) -> None:
        """Count a text; raises StopError if there are too many."""
        self._texts += 1
        if self._texts > _MOST_TEXTS:
            self._stop(place, f"there are more than {_MOST_TEXTS} texts; join neighbouring ones", code="pml.too_large")

    def name(self, name: Any, place: JSONPlace, reserved: Iterable[str] = ()) -> str:
        """Return a valid name, or "" after a problem. The models report values that are not texts."""
        if not isinstance(name, str):
            return ""
        problem = objection(name)
        if problem is None and name in reserved:
            problem = f"{quote(name)} is a tag of PML, which no module is named like; write another name"
        if problem:
            self.add(place, problem, code="pml.invalid_name")
        return "" if problem else name

    def path(self, path: Any, place: JSONPlace) -> str:
        """Return a valid path of a module, or "" after a problem."""
        if isinstance(path, str) and path.count("/") >= limits.MAX_DEPTH:
            self.add(
                place,
                f"this path has more than {limits.MAX_DEPTH} names; modules are nested less deeply",
                code="pml.too_deep",
            )
            return ""
        names = names_of(path) if isinstance(path, str) else ()
        return path if names and "" not in [self.name(name, place, TAGS) for name in names] else ""

    def meta(self, raw: JSONObject, place: JSONPlace) -> tuple[Meta, ...]:
        """Return the metadata of a part of a schema. Namespaced names come first, as in PML."""
        told = raw.get("meta")
        if not isinstance(told, JSONObject):
            return ()
        names = sorted(told, key=lambda name: not is_in_namespace(name))
        found = []
        for name in names:
            where = place.named("meta", name)
            if is_in_namespace(name) or self.name(name, where):
                found.append(Meta(name, told[name], where))
        return tuple(found)

    def label(self, raw: JSONObject, key: str, place: JSONPlace) -> str:
        """Return the name of a schema."""
        label = raw.get(key)
        if isinstance(label, str) and label and not label.strip():
            self.add(place.key(key), f"this is white space alone; write {_EXPECTED[key]}", code="pml.empty_attribute")
        return label if isinstance(label, str) else ""

    def _check_keys(self, raw: JSONObject, place: JSONPlace) -> None:
        for key in raw.twice:
            self.add(place, f"the key {quote(key)} stands here twice; keep one of them", code="pml.duplicate_key")
        if len(raw) > limits.MAX_ATTRIBUTES:
            self._stop(
                place, f"an object has more than {limits.MAX_ATTRIBUTES} keys; write fewer", code="pml.too_large"
            )

    def _report(self, error: ValidationError, raw: JSONObject, form: type[Form], place: JSONPlace) -> None:
        """Report pydantic's errors with our own messages."""
        found = error.errors(include_url=False, include_context=False, include_input=False)
        expected = _EXPECTED_IN.get(form, _EXPECTED)
        unknown = [str(one["loc"][0]) for one in found if one["type"] == "extra_forbidden"]
        missing = [str(one["loc"][0]) for one in found if one["type"] == "missing"]
        wrong = [one["loc"] for one in found if one["type"] not in ("extra_forbidden", "missing")]
        keys = [field.alias or name for name, field in form.model_fields.items()]
        meant = set()
        for key in unknown:
            near = self._problems.near(key, keys)
            meant.add(near)
            remedy = f"did you mean {quote(near)}?" if near else f"it takes {', '.join(map(quote, keys))}"
            self.add(place, f"{_CALLED[form]} takes no key {quote(key)}; {remedy}", code="pml.unknown_key")
        for key in missing:
            if key not in meant:
                self.add(place, f"{_CALLED[form]} has no {quote(key)}; write {expected[key]}", code="pml.missing_key")
        # a value that fits neither of two types has two entries
        for key, argument in dict.fromkeys((str(loc[0]), _argument(loc)) for loc in wrong):
            if argument is None:
                self.add(
                    place.key(key),
                    f"this is {shown(raw[key], kind=True)}; write {expected[key]}",
                    code="pml.wrong_type",
                )
            else:
                value = raw[key][argument]
                self.add(
                    place.named(key, argument),
                    f"this is {shown(value, kind=True)}; write {_VALUE}",
                    code="pml.wrong_type",
                )

    def _stop(self, place: Place, message: str, *, code: str) -> None:
        self._problems.add(place, message, code=code)
        raise StopError


def _argument(loc: tuple[int | str, ...]) -> str | None:
    """Return the name of the argument that an error concerns, if any."""
    return str(loc[1]) if loc[0] == "arguments" and len(loc) > 1 else None
