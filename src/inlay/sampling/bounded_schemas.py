"""Schemas of answers that come to an end: what a grammar lets an object grow to.

JSON Schema lets an object have any further properties unless it says otherwise, and few schemas do. Written by a model
that must go on as long as the grammar lets it, such an object grows until ``max_tokens``. So an object that is held has
the properties that its schema names, as OpenAI's strict mode and vLLM's grammars have it; where a schema has no
``properties``, or asks for others with ``additionalProperties``, there may be some.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inlay.sampling.json_schemas import BY_NAME, DATA

MAX_FREE = 16  # properties beyond those that are named, and items of a list of which nothing is said
FREE = "x-free"  # the definition of values of which nothing is said

_NOTES = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "format", "readOnly", "title", "writeOnly")
)
_PARTS = ("allOf", "anyOf", "oneOf")  # schemas that hold for a value beside others


def free_value() -> dict[str, Any]:
    """The schema of values of which nothing is said: lists and objects hold what is neither, or hold such."""
    value: dict[str, Any] = {"type": ["string", "number", "boolean", "null"]}
    for _ in range(2):
        rows = {"type": "array", "items": value, "maxItems": MAX_FREE}
        value = {"anyOf": [value, rows, {"type": "object", "additionalProperties": value, "maxProperties": MAX_FREE}]}
    return value


def bounded_document(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that stands alone, as ``bounded`` has it."""
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
    """A schema that only takes what this one takes, and whose objects do not grow without end.

    One that gives an object's properties in several schemas that hold together stays as it is: each of them would
    exclude those of the others.

    Args:
        schema: a JSON Schema.
        free: the name that ``free_value`` has among the definitions of the document that the result stands in.
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
        """by_name: whether its keys are names, and not keywords."""
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
        """The value of a keyword; of a name's schema."""
        if by_name or isinstance(value, Mapping | list) or key in ("items", "additionalProperties"):
            named = key in BY_NAME and not by_name
            return {**value} if named and not value else self.bounded(value, by_name=named)
        return value

    def _closed(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """What an object's schema says in addition, or anew."""
        named, required = schema.get("properties", {}), schema.get("required", [])
        least = schema.get("minProperties", 0)
        if not (isinstance(named, Mapping) and isinstance(required, list) and isinstance(least, int)):
            return {}  # it is no schema; whoever makes a grammar of it says so
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
    """How many schemas say which properties a value of this one has; whether they are several, here or further inside.

    Looks at everything once. Of a list, those that its members have together.
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
            shapes += inner if key == "allOf" else inner > 0  # of alternatives one holds
    return shapes, several or shapes > 1
