"""Schemas of arguments that come to an end: what a grammar that holds a call lets an object grow to.

JSON Schema lets an object have any further properties unless it says otherwise, and few schemas do. Written by a model
that must go on as long as the grammar lets it, such an object grows until ``max_tokens``. So an object that is held has
the properties that its schema names, as OpenAI's strict mode and vLLM's grammars have it; where a schema has no
``properties``, or asks for others with ``additionalProperties``, there may be some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_FREE = 16  # properties beyond those that are named, and items of a list of which nothing is said
FREE = "free"  # the definition of values of which nothing is said

_NOTES = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "format", "readOnly", "title", "writeOnly")
)
_PARTS = ("allOf", "anyOf", "oneOf")  # schemas that hold for a value beside others
_DATA = frozenset(("const", "default", "enum", "examples"))
_BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))


def free_value() -> dict[str, Any]:
    """The schema of values of which nothing is said: lists and objects hold what is neither, or hold such."""
    value: dict[str, Any] = {"type": ["string", "number", "boolean", "null"]}
    for _ in range(2):
        rows = {"type": "array", "items": value, "maxItems": MAX_FREE}
        value = {"anyOf": [value, rows, {"type": "object", "additionalProperties": value, "maxProperties": MAX_FREE}]}
    return value


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that only takes what this one takes, and whose objects do not grow without end.

    Refers to the definition FREE of the document that it stands in. One that gives an object's properties in several
    schemas that hold together stays as it is: each of them would exclude those of the others.
    """
    return {**schema} if _combines(schema) else _bounded(schema)


def _bounded(schema: Any, *, by_name: bool = False) -> Any:
    """by_name: whether its keys are names, and not keywords."""
    if schema is True or (isinstance(schema, Mapping) and not by_name and schema.keys() <= _NOTES):
        return {"$ref": f"#/$defs/{FREE}"}
    if isinstance(schema, list):
        return [_bounded(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {
        key: value if key in _DATA and not by_name else _inner(key, value, by_name=by_name)
        for key, value in schema.items()
    }
    if by_name:
        return made
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "array" in kinds and not schema.keys() & {"items", "prefixItems"}:
        made = {**made, "items": {"$ref": f"#/$defs/{FREE}"}, "maxItems": schema.get("maxItems", MAX_FREE)}
    if "properties" in schema or ("object" in kinds and not any(part in schema for part in (*_PARTS, "$ref"))):
        made |= _closed(made)
    return made


def _inner(key: str, value: Any, *, by_name: bool) -> Any:
    """The value of a keyword; of a name's schema."""
    if by_name or isinstance(value, Mapping | list) or key in ("items", "additionalProperties"):
        named = key in _BY_NAME and not by_name
        return {**value} if named and not value else _bounded(value, by_name=named)
    return value


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What an object's schema says in addition, or anew."""
    named: Mapping[str, Any] = schema.get("properties") or {}
    required: list[str] = list(schema.get("required") or ())
    unnamed = {name: {"$ref": f"#/$defs/{FREE}"} for name in required if name not in named}
    properties = {**named, **unnamed}
    asked = schema.get("additionalProperties", not schema.keys() & {"properties", "patternProperties"})
    further = asked if asked is not True else {"$ref": f"#/$defs/{FREE}"}
    least = schema.get("minProperties", 0)
    if further is False and "patternProperties" not in schema and len(properties) < least:
        further = {"$ref": f"#/$defs/{FREE}"}
    made = {**({"properties": properties} if properties else {}), "additionalProperties": further}
    if further is False and "patternProperties" not in schema:
        return made
    if properties.keys() <= set(required):
        return {"maxProperties": len(properties) + MAX_FREE, **_given(schema, "maxProperties"), **made}
    return made if "patternProperties" in schema or least else {**made, "additionalProperties": False}


def _given(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: schema[key]} if key in schema else {}


def _combines(schema: Any) -> bool:
    """Whether somewhere in it several schemas say which properties one and the same object has."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    return _shapes(schema) > 1 or any(_combines(value) for key, value in schema.items() if key not in _DATA)


def _shapes(schema: Any) -> int:
    """How many schemas say which properties a value of this one has."""
    if not isinstance(schema, Mapping):
        return 0
    parts = {key: schema[key] for key in _PARTS if isinstance(schema.get(key), list)}
    alternatives = [any(map(_shapes, parts[key])) for key in ("anyOf", "oneOf") if key in parts]
    return sum(map(_shapes, parts.get("allOf", ()))) + sum(alternatives) + ("$ref" in schema) + ("properties" in schema)
