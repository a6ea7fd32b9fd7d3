"""The bytes of a request's body → a value of JSON, in one parse and bounded time, or a sentence that says why not.

Stricter than Python's parser: UTF-8 alone, no NaN, no key twice (which of the two counts differs from parser to parser,
so a proxy that checks bodies may have checked the other), no halves of characters, and bounds on nesting and on how
many lists and objects (an empty one takes 2 bytes of a body and 60 of memory), fields and values there are: Python's
parser lets no other thread run until it is through with all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

import numpy as np

from inlay.openai.failures import BodyError
from inlay.openai.values import holds_half_characters

MAX_CONTAINERS = 100_000  # lists and objects, as many as PML may have elements
MAX_FIELDS = 100_000  # of all objects together
MAX_VALUES = 2**20  # the token ids of a prompt are some

_LONG = b"0" * 400  # digits of a number that takes a while to convert
_DIGITS = bytes.maketrans(b"0123456789", b"0" * 10)
_STRUCTURE = b'"[]{}:,'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_QUOTE = _STRUCTURE[0]
_STEPS = np.zeros(256, np.int8)  # how each byte changes the depth
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_COLON, _COMMA = b":,"


def parse_json(data: bytes | bytearray, max_nesting: int) -> Any:
    """The value that a body holds; None for an empty body. Raises BodyError."""
    text = decoded(data)
    if not text or text.isspace():
        return None
    _check_structure(data, max_nesting)
    try:
        # Long numbers take a while, each by a function of Python's: between two of them others have their turn.
        whole = _whole if _LONG in data.translate(_DIGITS) else None
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=whole)
    except json.JSONDecodeError as error:
        raise _wrong(f"is not JSON ({error.msg} at line {error.lineno}, column {error.colno}); correct it") from None
    except RecursionError:  # where max_nesting is more than Python can do
        raise _wrong("nests lists and objects too deeply; nest them less deeply") from None
    except BodyError:
        raise
    except ValueError:  # of int(): a number that would take long to convert
        raise _wrong("holds a number of more than 4,300 digits; write a smaller one") from None
    if b"\\ud" in data or b"\\uD" in data:
        _check_characters(value)
    return value


def decoded(data: bytes | bytearray) -> str:
    """A body as text. Raises BodyError where it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _wrong(f"is not UTF-8 from byte {error.start + 1:,} on; encode it as UTF-8") from None


def _check_structure(data: bytes | bytearray, most: int) -> None:
    """Refuse what nests too deeply or holds too much, before it is parsed. Right for JSON, and up to its first mistake.

    Looks at whole arrays: a loop over the characters of 8 MiB would take half a second.
    """
    opened, colons, commas = data.count(b"[") + data.count(b"{"), data.count(b":"), data.count(b",")
    if opened <= most and colons <= MAX_FIELDS and commas <= MAX_VALUES:
        return  # and this is so whatever of it stands in texts
    if b"\\" in data:  # pairs of backslashes first: what then stands before a quotation mark escapes it
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = np.frombuffer(data.translate(None, _OTHERS), np.uint8)
    kept = kept[np.cumsum(kept == _QUOTE, dtype=np.uint8) & 1 == 0]  # outside of texts; it wraps around at 256, an even
    steps = _STEPS[kept]
    for found, allowed, what in (
        (steps > 0, MAX_CONTAINERS, "lists and objects"),
        (kept == _COLON, MAX_FIELDS, "fields"),
        (kept == _COMMA, MAX_VALUES, "values"),
    ):
        if np.count_nonzero(found) > allowed:
            raise _wrong(f"holds more than {allowed:,} {what}; send several requests")
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > most:
        raise _wrong(f"nests lists and objects more than {most} deep; nest them less deeply")


def _whole(digits: str) -> int:
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _wrong(f"gives {_shown(twice)} twice in one object; keep one of them")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise _wrong(f"holds {name}, which is no value of JSON; write a number, or leave it out")


def _check_characters(value: Any) -> None:
    if holds_half_characters(value):
        raise _wrong("holds half a character (a lone surrogate); cut texts between characters")


def _shown(name: str) -> str:
    return json.dumps(name if len(name) <= 60 else f"{name[:60]}…")


def _wrong(what: str) -> BodyError:
    return BodyError(f"the body {what}", code="invalid_json")
