"""Rewrites the JSON Schemas of clients to the keywords that llguidance knows, and bounds them.

``holdable`` rewrites a schema. Annotations are removed, among them formats that llguidance does not know. Other unknown
keywords are written with keywords that it knows. The result may accept fewer values than the given schema, and never
more.

``bounded`` bounds a schema, so that a grammar cannot let an object or list grow without end. JSON Schema allows any
further properties in an object unless the schema forbids them. Few schemas do. A model that must continue as long as
the grammar allows then fills the object until ``max_tokens``. So a bounded object has only the properties that its
schema names, as in OpenAI's strict mode and vLLM's grammars. Up to MAX_FREE other properties are allowed if the schema
has no ``properties``, or if it sets ``additionalProperties``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

#: Keywords whose values are no schemas.
DATA = frozenset(("const", "default", "enum", "examples"))
#: Keywords whose values are objects of schemas by name.
BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))

_FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
_NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}  # every text of these is one of those
_UUID_VERSION = re.compile(r"uuid([1-8])")
_HEX = "[0-9a-fA-F]"
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])"  # of names: no 30th and 31st, which not all months have
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_NAME_PATTERNS = {
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-[1-5]{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$",
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}Z$",
    "time": f"^{_TIME}$",
}

# Stands in front of pydantic's pattern of Decimal, which takes signs, points and digits: there must be a digit.
_NOT_SIGNS_ALONE = "^(?!^[-+.]*$)"
_HAS_DIGIT = {"type": "string", "pattern": "[0-9]"}

_LONGEST_SHOWN = 10**40  # numbers below it are written out
_LARGEST_INTEGER = 2**63 - 1024  # the largest below 2**63 that a float holds; llguidance reads bounds as floats
_LARGEST_NUMBER = 10**15  # beyond it llguidance writes no ranges
_SMALLEST_NUMBER = Decimal("1e-9")
_LONGEST_TEXT = 100_000  # characters that a minLength or maxLength may ask for
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_APPLIED = frozenset(("$ref", "allOf", "anyOf", "oneOf"))  # keywords that say more about the same value
_MAX_NAMES = 512  # that propertyNames may list

#: Keywords that no grammar holds an answer to → what to do instead.
_UNHELD = {
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
    "contains": "describe the items with items",
    "dependencies": "write the cases as schemas of anyOf",
    "dependentRequired": "write the cases as schemas of anyOf",
    "dependentSchemas": "write the cases as schemas of anyOf",
    "if": "write the cases as schemas of anyOf",
    "not": "say what the value must be, with enum, pattern or anyOf",
    "propertyNames": "name the properties, or write patternProperties",
    "unevaluatedItems": "write items beside prefixItems",
    "unevaluatedProperties": "write additionalProperties",
    "uniqueItems": "leave it out, and check the list that comes",
}


class GrammarError(Exception):
    """No grammar can enforce a schema or language. The message is the reason."""


def holdable(schema: Any, *, sets_as_lists: bool = False) -> Any:
    """Return a schema that a grammar can enforce. It accepts no value that ``schema`` rejects.

    Args:
        schema: a JSON Schema without references to other documents.
        sets_as_lists: True to leave ``uniqueItems`` out, so that items of a list may repeat.

    Raises:
        GrammarError: no grammar can enforce the schema. The message names the place in it.
    """
    return _Writer(schema, sets_as_lists=sets_as_lists).schema(self_contained(schema), ())


def self_contained(schema: Any) -> Any:
    """Return a schema without ``$id`` and ``$anchor``: every reference becomes a JSON pointer into the schema.

    Raises GrammarError for a reference to another document. Such documents are never fetched.
    """
    places = _Places(schema)
    return places.rewritten(schema)


def place_of(path: Sequence[str | int]) -> str:
    """Return the name of a place in a schema for messages, such as ``properties.city.items``."""
    return ".".join(map(str, path))


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the schemas directly inside a schema, each with its path from there."""
    for key, value in schema.items():
        if key in DATA:
            continue
        if key in BY_NAME and isinstance(value, Mapping):
            yield from (((key, name), inner) for name, inner in value.items())
        elif isinstance(value, list):
            yield from (((key, number), inner) for number, inner in enumerate(value) if isinstance(inner, Mapping))
        elif isinstance(value, Mapping):
            yield (key,), value


def referred(root: Any, reference: str) -> tuple[tuple[str, ...], Any]:
    """Return the path of a reference into a document, and the schema there. None in place of a missing schema."""
    steps = tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:])
    for step in steps:
        root = root.get(step) if isinstance(root, Mapping) else None
    return steps, root


class _Places:
    """The places of a document's schemas that have a URI or an anchor, and the rewriting of references to them."""

    def __init__(self, schema: Any) -> None:
        self._pointers: dict[str, str] = {"": ""}  # of documents and anchors, by URI
        self._collect(schema, "", "")

    def _collect(self, schema: Any, base: str, pointer: str) -> None:
        if not isinstance(schema, Mapping):
            return
        base = self._base(schema, base)
        if isinstance(schema.get("$id"), str) or not pointer:
            self._pointers.setdefault(base, pointer)
        anchor = schema.get("$anchor")
        if isinstance(anchor, str):
            self._pointers.setdefault(f"{base}#{anchor}", pointer)
        for path, inner in subschemas(schema):
            self._collect(inner, base, pointer + "".join(f"/{_escaped(str(step))}" for step in path))

    def rewritten(self, schema: Any, base: str = "", path: tuple[str | int, ...] = (), *, by_name: bool = False) -> Any:
        if isinstance(schema, list):
            return [self.rewritten(inner, base, (*path, number)) for number, inner in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        if by_name:
            return {name: self.rewritten(inner, base, (*path, name)) for name, inner in schema.items()}
        base = self._base(schema, base)
        made = {
            key: value
            if key in DATA
            else self.rewritten(value, base, (*path, key), by_name=key in BY_NAME and isinstance(value, Mapping))
            for key, value in schema.items()
            if key not in ("$anchor", "$id") or not isinstance(value, str)
        }
        reference = schema.get("$ref")
        if isinstance(reference, str):
            made["$ref"] = self._local(reference, base, path)
        return made

    def _local(self, reference: str, base: str, path: Sequence[str | int]) -> str:
        document, fragment = urldefrag(reference)
        document = urldefrag(_joined(base, document))[0] if document else base
        named = f"{document}#{fragment}"
        if named in self._pointers:
            pointer = self._pointers[named]
        elif document in self._pointers and (not fragment or fragment.startswith("/")):
            pointer = self._pointers[document] + fragment
        else:
            raise GrammarError(f"{_at(path)}$ref is {reference!r:.80}, which is not in the schema; put it into $defs")
        return "#" + quote(pointer, safe="/$%~!&'()*+,;=:@")

    @staticmethod
    def _base(schema: Mapping[str, Any], base: str) -> str:
        own = schema.get("$id")
        if not isinstance(own, str) or own.startswith("#"):
            return base
        return urldefrag(_joined(base, own))[0]


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # it is no URI
        return uri


class _Writer:
    """Rewrites the schemas of one document; see ``holdable``."""

    def __init__(self, root: Any, *, sets_as_lists: bool) -> None:
        self._root = self_contained(root)
        self._sets_as_lists = sets_as_lists

    def schema(self, schema: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(schema, list):
            return [self.schema(inner, (*path, number)) for number, inner in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        made = self._without_needless(schema)
        self._names_as_properties(made, path)
        self._unevaluated_as_additional(made)
        for key in made:
            if key in _UNHELD:
                raise GrammarError(f"{_at(path)}a grammar cannot hold an answer to {key}; {_UNHELD[key]}")
        self._formats(made)
        self._numbers(made, path)
        self._counts(made, path)
        self._pattern(made)
        for key, value in made.items():
            if key in DATA:
                continue
            if key in BY_NAME and isinstance(value, Mapping):
                made[key] = {name: self.schema(inner, (*path, key, name)) for name, inner in value.items()}
            elif isinstance(value, Mapping | list):
                made[key] = self.schema(value, (*path, key))
        if isinstance(made.get("oneOf"), list) and "anyOf" not in made and self._exclude_each_other(made["oneOf"]):
            made["anyOf"] = made.pop("oneOf")
        return made

    def _without_needless(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema without keywords that have no effect there."""
        made = dict(schema)
        needless = {
            "$dynamicAnchor": True,
            "$recursiveAnchor": True,
            "dependencies": schema.get("dependencies") == {},
            "dependentRequired": schema.get("dependentRequired") == {},
            "dependentSchemas": schema.get("dependentSchemas") == {},
            "else": "if" not in schema,
            "if": not schema.keys() & {"then", "else"},
            "maxContains": "contains" not in schema,
            "minContains": "contains" not in schema,
            "not": schema.get("not") is False,
            "propertyNames": _asks_for_nothing(schema.get("propertyNames"), "string"),
            "then": "if" not in schema,
            "unevaluatedItems": _asks_for_nothing(schema.get("unevaluatedItems")),
            "unevaluatedProperties": _asks_for_nothing(schema.get("unevaluatedProperties")),
            "uniqueItems": schema.get("uniqueItems") is not True or self._sets_as_lists or _at_most_one(schema),
        }
        for key, unneeded in needless.items():
            if unneeded:
                made.pop(key, None)
        if schema.get("contains") in (True, {}) and "minContains" not in schema and "maxContains" not in schema:
            del made["contains"]  # any item is one
            made["minItems"] = max(1, _whole(schema.get("minItems"), 0))
        return made

    def _names_as_properties(self, made: dict[str, Any], path: tuple[str | int, ...]) -> None:
        """Write ``propertyNames`` as properties with these names, or with these patterns."""
        names = self._resolved(made.get("propertyNames"))
        if not isinstance(names, Mapping) or made.keys() & {"patternProperties"}:
            return
        listed = [names["const"]] if "const" in names else names.get("enum")
        further = made.get("additionalProperties", True)
        if isinstance(listed, list):
            if len(listed) > _MAX_NAMES:
                raise GrammarError(f"{_at(path)}propertyNames lists more than {_MAX_NAMES} names; list fewer")
            given = made.get("properties", {})
            allowed = [name for name in listed if isinstance(name, str)]
            kept = {name: value for name, value in given.items() if name in allowed}
            if further is not False:
                kept |= {name: further for name in allowed if name not in given}
            made["properties"], made["additionalProperties"] = kept, False
        elif not made.get("properties") and further is not False and (pattern := _pattern_of_names(names)):
            made["patternProperties"], made["additionalProperties"] = {pattern: further}, False
        else:
            return
        del made["propertyNames"]

    @staticmethod
    def _unevaluated_as_additional(made: dict[str, Any]) -> None:
        if made.keys() & _APPLIED:
            return
        if made.get("unevaluatedProperties") is not None:
            made.setdefault("additionalProperties", made.pop("unevaluatedProperties"))
            made.pop("unevaluatedProperties", None)
        if made.get("unevaluatedItems") is not None:
            made.setdefault("items", made.pop("unevaluatedItems"))
            made.pop("unevaluatedItems", None)

    @staticmethod
    def _formats(made: dict[str, Any]) -> None:
        """Remove unknown formats, which are annotations. Write others as formats or patterns that llguidance knows."""
        given = made.get("format")
        if not isinstance(given, str) or given in _FORMATS:
            return
        del made["format"]
        version = _UUID_VERSION.fullmatch(given)
        if given in _NARROWER:
            made["format"] = _NARROWER[given]
        elif version is not None and "pattern" not in made:
            made["pattern"] = f"^{_HEX}{{8}}-{_HEX}{{4}}-{version[1]}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"

    @staticmethod
    def _numbers(made: dict[str, Any], path: tuple[str | int, ...]) -> None:
        """Narrow the bounds of numbers to values that llguidance can represent. Raises GrammarError if none is left."""
        whole = made.get("type") == "integer"
        for key, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
            given = made.get(key)
            if not isinstance(given, int | float) or isinstance(given, bool):
                continue
            if isinstance(given, float) and not math.isfinite(given):
                continue
            bound = Decimal(repr(given) if isinstance(given, float) else given) * sign  # as if all were minimums
            largest = _LARGEST_INTEGER if whole else _LARGEST_NUMBER
            if bound > largest:
                raise GrammarError(f"{_at((*path, key))}it is {_shown(given)}; a grammar can hold {largest:,} at most")
            held = bound
            if bound < -largest:
                held = Decimal(-largest)
            elif not whole and 0 < abs(bound) < _SMALLEST_NUMBER:
                held = _SMALLEST_NUMBER if bound > 0 else Decimal(0)
            if held != bound:
                del made[key]
                inclusive = key if not key.startswith("exclusive") else key.removeprefix("exclusive").lower()
                made[inclusive] = _number(held * sign)

    @staticmethod
    def _counts(made: dict[str, Any], path: tuple[str | int, ...]) -> None:
        for key in _COUNTS:
            count = made.get(key)
            if isinstance(count, float) and count.is_integer():
                made[key] = count = int(count)
            if not isinstance(count, int) or isinstance(count, bool) or count <= _LONGEST_TEXT:
                continue
            if key.startswith("min"):
                raise GrammarError(
                    f"{_at((*path, key))}it is {_shown(count)}; a grammar can hold {_LONGEST_TEXT:,} at most"
                )
            if key == "maxLength":
                made[key] = _LONGEST_TEXT

    @staticmethod
    def _pattern(made: dict[str, Any]) -> None:
        given = made.get("pattern")
        if isinstance(given, str) and given.startswith(_NOT_SIGNS_ALONE):
            made["pattern"] = "^" + given.removeprefix(_NOT_SIGNS_ALONE)
            made["allOf"] = [*made.get("allOf", []), _HAS_DIGIT]

    def _exclude_each_other(self, alternatives: Sequence[Any]) -> bool:
        """Return True if no value fits two alternatives: they list other values, or differ in a required property."""
        resolved = [self._resolved(one) for one in alternatives]
        if not all(isinstance(one, Mapping) for one in resolved):
            return False
        listed = [_listed(one) for one in resolved]
        if all(values is not None for values in listed):
            return _disjoint(listed)
        required = [_names(one) for one in resolved]
        return any(_disjoint([self._values_of(one, name) for one in resolved]) for name in set.intersection(*required))

    def _values_of(self, schema: Mapping[str, Any], name: str) -> list[str] | None:
        return _listed(self._resolved(schema["properties"].get(name)))

    def _resolved(self, schema: Any) -> Any:
        """Return the schema that a reference leads to. A schema without ``$ref`` is returned itself."""
        for _ in range(8):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = referred(self._root, schema["$ref"])[1]
        return schema


def _asks_for_nothing(schema: Any, kind: str = "") -> bool:
    """Return True if a schema accepts every value, or every value of the type ``kind``."""
    if not isinstance(schema, Mapping):
        return schema is True
    return schema.keys() <= {"type", "title", "description"} and schema.get("type", kind) == kind


def _at_most_one(schema: Mapping[str, Any]) -> bool:
    return isinstance(schema.get("maxItems"), int) and schema["maxItems"] <= 1


def _pattern_of_names(names: Mapping[str, Any]) -> str | None:
    """Return a pattern for the names that a schema of texts accepts. None if a pattern cannot express the schema."""
    asked = {key: value for key, value in names.items() if key not in ("type", "title", "description")}
    if names.get("type", "string") != "string":
        return None
    if asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        return str(asked["pattern"])
    if asked.keys() == {"format"}:
        # the formats of names that are not here are annotations
        return _NAME_PATTERNS.get(asked["format"], r"^[\s\S]*$") if isinstance(asked["format"], str) else None
    if asked.keys() <= {"minLength", "maxLength"}:
        longest = _whole(asked.get("maxLength"), -1)
        return rf"^[\s\S]{{{_whole(asked.get('minLength'), 0)},{min(longest, 256) if longest >= 0 else ''}}}$"
    return None


def _listed(schema: Any) -> list[str] | None:
    """Return the values of ``const`` or ``enum`` as JSON. None if the schema lists no values."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [_as_json(schema["const"])]
    values = schema.get("enum")
    if isinstance(values, list):
        return [_as_json(value) for value in values]
    return ["null"] if schema.get("type") == "null" else None


def _as_json(value: Any) -> str:
    """Return a value as JSON, so that equal values have equal texts: 1 and 1.0 are one number."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True)


def _disjoint(listed: Sequence[list[str] | None]) -> bool:
    found: set[str] = set()
    for values in listed:
        if values is None or found & set(values):
            return False
        found |= set(values)
    return True


def _names(schema: Mapping[str, Any]) -> set[str]:
    """Return the required properties of a schema of objects, as far as it describes them."""
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}


def _shown(number: float) -> str:
    """Return a number for an error message. Python writes no integer of more than 4,300 digits."""
    return repr(number) if abs(number) < _LONGEST_SHOWN else f"{Decimal(number):.3e}"


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def _at(path: Sequence[str | int]) -> str:
    return f"at {place_of(path)}, " if path else ""


MAX_FREE = 16  # the most unnamed properties of an object, and untyped items of a list
FREE = "x-free"  # the name of the definition of untyped values

_NOTES = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "format", "readOnly", "title", "writeOnly")
)
_PARTS = ("allOf", "anyOf", "oneOf")  # keywords with schemas for the same value


def free_value() -> dict[str, Any]:
    """Return the schema of untyped values, in which lists and objects nest at most two deep."""
    value: dict[str, Any] = {"type": ["string", "number", "boolean", "null"]}
    for _ in range(2):
        rows = {"type": "array", "items": value, "maxItems": MAX_FREE}
        value = {"anyOf": [value, rows, {"type": "object", "additionalProperties": value, "maxProperties": MAX_FREE}]}
    return value


def bounded_document(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``bounded`` for a whole document, with the definition of untyped values."""
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, Mapping):
        return dict(schema)
    names = (FREE, *(f"{FREE}-{number}" for number in range(len(definitions))))
    free = next(name for name in names if name not in definitions)
    made = bounded(schema, free)
    if f'"{_reference(free)}"' not in json.dumps(made):
        return made
    return {**made, "$defs": {**made.get("$defs", {}), free: free_value()}}


def bounded(schema: Mapping[str, Any], free: str = FREE) -> dict[str, Any]:
    """Return a stricter schema, in which objects and lists have bounded size.

    A schema that gives the properties of one object in several schemas is returned unchanged. Each of them would
    exclude the properties of the others.

    Args:
        schema: a JSON Schema.
        free: the name of ``free_value`` among the definitions of the result's document.
    """
    _, several = _shapes(schema)
    return {**schema} if several else _Bounds(free).bounded(schema)


def _reference(name: str) -> str:
    return f"#/$defs/{name}"


class _Bounds:
    """Sets bounds, with references to the definition ``free``."""

    def __init__(self, free: str) -> None:
        self._free = {"$ref": _reference(free)}

    def bounded(self, schema: Any, *, by_name: bool = False) -> Any:
        """by_name: True if the keys are names, not keywords."""
        if schema is True or (isinstance(schema, Mapping) and not by_name and schema.keys() <= _NOTES):
            return self._free
        if isinstance(schema, list):
            return [self.bounded(inner) for inner in schema]
        if not isinstance(schema, Mapping):
            return schema
        made = {
            key: value if key in DATA and not by_name else self._inner(key, value, by_name=by_name)
            for key, value in schema.items()
        }
        if by_name:
            return made
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "array" in kinds and not schema.keys() & {"items", "prefixItems"}:
            made = {**made, "items": self._free, "maxItems": schema.get("maxItems", MAX_FREE)}
        if "properties" in schema or ("object" in kinds and not any(part in schema for part in (*_PARTS, "$ref"))):
            made |= self._closed(made)
        return made

    def _inner(self, key: str, value: Any, *, by_name: bool) -> Any:
        """Bound the value of a keyword, or the schema of a name."""
        if by_name or isinstance(value, Mapping | list) or key in ("items", "additionalProperties"):
            named = key in BY_NAME and not by_name
            return {**value} if named and not value else self.bounded(value, by_name=named)
        return value

    def _closed(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords that bound an object's schema. They replace its own keywords of these names."""
        named, required = schema.get("properties", {}), schema.get("required", [])
        least = schema.get("minProperties", 0)
        if not (isinstance(named, Mapping) and isinstance(required, list) and isinstance(least, int)):
            return {}  # an invalid schema; compiling reports it
        unnamed = {name: self._free for name in required if isinstance(name, str) and name not in named}
        properties = {**named, **unnamed}
        asked = schema.get("additionalProperties", not schema.keys() & {"properties", "patternProperties"})
        further = asked if asked is not True else self._free
        if further is False and "patternProperties" not in schema and len(properties) < least:
            further = self._free
        made = {**({"properties": properties} if properties else {}), "additionalProperties": further}
        if further is False and "patternProperties" not in schema:
            return made
        if all(name in required for name in properties):
            return {"maxProperties": len(properties) + MAX_FREE, **_given(schema, "maxProperties"), **made}
        return made if "patternProperties" in schema or least else {**made, "additionalProperties": False}


def _given(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: schema[key]} if key in schema else {}


def _shapes(schema: Any) -> tuple[int, bool]:
    """Count the schemas that name properties of this value. Also True if any value, here or inside, has several.

    Visits each schema once. For a list, returns the sum over its members.
    """
    if isinstance(schema, list):
        found = [_shapes(inner) for inner in schema]
        return sum(count for count, _ in found), any(several for _, several in found)
    if not isinstance(schema, Mapping):
        return 0, False
    shapes, several = ("$ref" in schema) + ("properties" in schema), False
    for key, value in schema.items():
        inner, inside = (0, False) if key in DATA else _shapes(value)
        several = several or inside
        if key in _PARTS:
            shapes += inner if key == "allOf" else inner > 0  # only one alternative applies
    return shapes, several or shapes > 1
