"""Turns documents in the JSON form of PML into Python values: strict JSON, with located errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.pml import nodes as limits
from inlay.pml.parser import place_at
from inlay.pml.sources import document_from_string
from inlay.strict_json import JSONError, JsonFault, Pairs, read_json, repeated

# Coarse bounds that keep validation short. The reader counts objects, depth and texts exactly, with their places.
_MAX_NESTING = 4 * limits.MAX_DEPTH  # lists and objects
_MAX_VALUES = 10 * limits.MAX_ELEMENTS
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
        return read_json(
            data,
            max_depth=_MAX_NESTING,
            max_values=_MAX_VALUES,
            make_object=JSONObject.of,
            make_integer=_integer,
        )
    except JSONError as error:
        place = Place(source, error.line, error.column)
        code = "pml.too_large" if error.fault is JsonFault.VALUES else "pml.malformed_json"
        raise PMLError([Problem(place, _sentence(error), code=code)]) from None


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
    if error.fault is JsonFault.VALUES:
        return f"there are more than {_MAX_VALUES:,} values; split this into several files"
    return f"objects are nested more than {limits.MAX_DEPTH} deep; nest less deeply"
