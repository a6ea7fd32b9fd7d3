"""Bounds JSON Schemas, so that a grammar cannot let an object or list grow without end.

JSON Schema allows any further properties in an object unless the schema forbids them. Few schemas do. A model that must
continue as long as the grammar allows then fills the object until ``max_tokens``. So a bounded object has only the
properties that its schema names, as in OpenAI's strict mode and vLLM's grammars. Some others are allowed if the schema
has no ``properties``, or asks for them with ``additionalProperties``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inlay.sampling.json_schemas import BY_NAME, DATA

MAX_FREE = 16  # the most unnamed properties of an object, and untyped items of a list
FREE = "x-free"  # the name of the definition of untyped values

_NOTES = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "format", "readOnly", "title", "writeOnly")
)
_PARTS = ("allOf", "anyOf", "oneOf")  # keywords with schemas for the same value


def free_value() -> dict[str, Any]:
    """The schema of untyped values. Lists and objects nest to a depth of two."""
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
        """The bounds of an object's schema, which replace its own keywords."""
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
