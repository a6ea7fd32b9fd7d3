"""JSON text → plain values, with a place for what is not JSON. Knows nothing of schemas or prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.pml.nodes import MAX_DEPTH
from inlay.pml.parser import place_at
from inlay.pml.problems import clip
from inlay.pml.sources import document_from_string

_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_DIGITS = 18  # of a whole number that is still taken for one
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
    """An object; ``twice`` holds the keys that it was given more than once."""

    twice: tuple[str, ...] = ()


def is_json(path: str) -> bool:
    """Whether a file of this name holds JSON, and not PML."""
    return path.lower().endswith(".json")


def document_from_json(document: str | bytes | Mapping[str, Any], source: str) -> bytes:
    """A document in whatever way it is given, as UTF-8 text; raises PMLError, or ParameterError for another type."""
    if isinstance(document, Mapping):
        return document_from_string(_dumped(document), source)
    if isinstance(document, str):
        return document_from_string(document, source)
    if not isinstance(document, bytes | bytearray):
        kind = type(document).__name__
        raise ParameterError(f"from_json takes a str, bytes or a mapping, not {kind}; give a path to from_file")
    try:
        return document_from_string(bytes(document).decode(), source)
    except UnicodeDecodeError as error:
        place = place_at(source, document[: error.start].decode())
        raise PMLError([Problem(place, "this is not UTF-8; encode it as UTF-8")]) from None


def parse_json(data: bytes, source: str) -> Any:
    """The value that a document in UTF-8 holds, objects as JSONObject; raises PMLError."""
    text = data.decode()
    start = text.lstrip()[:1]
    if start in ("", "<"):
        message = "this is PML, not JSON; read it with from_string, or from a file that does not end in .json"
        nothing = 'there is nothing here; write {"name": "…"} for a schema, or {"schema": "…"} for a prompt'
        _refuse(Place(source, 1, 1), message if start else nothing)
    _refuse_lone_surrogates(text, source)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        message = _REMEDIES.get(error.msg, f"this is not JSON ({error.msg}); correct it")
        _refuse(Place(source, error.lineno, error.colno), message)
    except _ConstantError as error:
        _refuse(Place(source), f"{error} is no value of JSON; write a number, or leave it out")
    except RecursionError:
        _refuse(Place(source), f"objects are nested more than {MAX_DEPTH} deep; nest less deeply")


class _ConstantError(Exception):
    """NaN or Infinity stands where JSON has none."""


def _dumped(document: Mapping[str, Any]) -> str:
    # so that a mapping is held to the same rules as text: nothing but JSON, no NaN, and a bounded size
    try:
        return json.dumps(dict(document), default=_as_dict, ensure_ascii=True)
    except RecursionError:
        raise ParameterError(f"the mapping is nested more than {MAX_DEPTH} deep; nest less deeply") from None
    except (TypeError, ValueError) as error:
        raise ParameterError(f"the mapping is no JSON ({error}); use str, int, list, dict and None") from None


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds {type(value).__name__}")


def _object(pairs: list[tuple[str, Any]]) -> JSONObject:
    made = JSONObject(pairs)
    if len(made) < len(pairs):
        made.twice = tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return made


def _integer(digits: str) -> int | float:
    # Python refuses to convert very long numbers, and none of ours is long
    return int(digits) if len(digits) <= _DIGITS else float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(name)


def _refuse_lone_surrogates(text: str, source: str) -> None:
    if "\\ud" not in text and "\\uD" not in text:
        return
    for found in _ESCAPE.finditer(text):  # backslashes stand in strings alone
        if found["lone"]:
            place = place_at(source, text[: found.start()])
            _refuse(place, f"{clip(found[0])} alone is half a character; write both halves, or leave it out")


def _refuse(place: Place, message: str) -> NoReturn:
    raise PMLError([Problem(place, message)])
