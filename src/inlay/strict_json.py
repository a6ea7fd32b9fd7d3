"""Strict JSON: bytes → a value, or what is wrong with them and where. Every part of inlay reads JSON from outside so.

Stricter than Python's own parser: UTF-8 alone, no NaN, no key twice (which of the two counts differs from parser to
parser, so a proxy that checks bodies may have checked the other), no halves of characters, and bounds on nesting and on
how many lists and objects there are (an empty one takes 2 bytes of JSON and 60 of memory).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import numpy as np

Pairs = list[tuple[str, Any]]

_STRUCTURE = b'"[]{}'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_QUOTE = _STRUCTURE[0]
_STEPS = np.zeros(256, np.int8)  # how each byte changes the depth
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1

# all that may stand before half a character: pairs of halves, and whatever is no half; never gone back into
_WHOLE = re.compile(
    r"(?:[^\\]++|\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?!u[dD][89a-fA-F]).))*+", re.DOTALL
)
_HALF = 6  # characters of an escape: \ud83d


class Fault(Enum):
    """What can be wrong with JSON."""

    ENCODING = "it is not UTF-8"
    SYNTAX = "it is not JSON"
    CONSTANT = "it holds NaN or Infinity"
    TWICE = "a key stands twice in one object"
    HALF = "a text holds half a character, a lone surrogate"
    NUMBER = "a whole number is longer than Python converts"
    DEPTH = "lists and objects are nested too deeply"
    SIZE = "there are too many lists and objects"


class JSONError(Exception):
    """JSON that is not taken. Who reads it says so in a sentence of its own.

    fault: what is wrong.
    detail: Python's words for a mistake of syntax; the constant, the key or the half of a character that it is about.
    index: where it stands, in bytes for ENCODING and else in characters; None where that is not known.
    line, column: the same, from 1; columns in characters.
    """

    def __init__(self, fault: Fault, detail: str = "", text: str = "", index: int | None = None) -> None:
        super().__init__(f"{fault.value}: {detail}" if detail else fault.value)
        self.fault = fault
        self.detail = detail
        self.index = index
        self.line = self.column = None if index is None else 1
        if index is not None:
            self.line = text.count("\n", 0, index) + 1
            self.column = index - text.rfind("\n", 0, index)


def unique(pairs: Pairs) -> dict[str, Any]:
    """An object of these keys and values. Raises JSONError where a key stands twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise JSONError(Fault.TWICE, repeated(pairs)[0])
    return made


def repeated(pairs: Pairs) -> tuple[str, ...]:
    """The keys that stand more than once among these, in order."""
    return tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)


def read_json(
    data: bytes | bytearray,
    *,
    max_depth: int | None = None,
    max_containers: int | None = None,
    make_object: Callable[[Pairs], dict[str, Any]] = unique,
    make_integer: Callable[[str], int | float] = int,
) -> Any:
    """The value that JSON in UTF-8 holds. Raises JSONError.

    max_depth: how many lists and objects may be inside each other; as many as Python can read, if not given.
    max_containers: how many lists and objects there may be.
    make_object: what becomes of an object's keys and values; make_integer: of a whole number's digits.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise JSONError(Fault.ENCODING, index=error.start) from None
    _check_nesting(data, max_depth, max_containers)
    try:
        value = json.loads(text, object_pairs_hook=make_object, parse_constant=_refuse_constant, parse_int=make_integer)
    except json.JSONDecodeError as error:
        raise JSONError(Fault.SYNTAX, error.msg, text, error.pos) from None
    except RecursionError:
        raise JSONError(Fault.DEPTH) from None
    except ValueError:  # of int(), which takes long for long numbers
        raise JSONError(Fault.NUMBER) from None
    if b"\\ud" in data or b"\\uD" in data:
        _check_characters(text)
    return value


def _check_nesting(data: bytes | bytearray, max_depth: int | None, max_containers: int | None) -> None:
    """Refuse what is nested too deeply, before it is parsed. Right for JSON, and up to the first mistake in it.

    Looks at whole arrays: a loop over the characters of 8 MiB would take half a second.
    """
    bounds = [bound for bound in (max_depth, max_containers) if bound is not None]
    if not bounds or data.count(b"[") + data.count(b"{") <= min(bounds):
        return
    if b"\\" in data:  # pairs of backslashes first: what then stands before a quotation mark escapes it
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = np.frombuffer(data.translate(None, _OTHERS), np.uint8)
    in_text = np.cumsum(kept == _QUOTE, dtype=np.uint8) & 1  # it wraps around at 256, which is even
    steps = np.where(in_text, np.int8(0), _STEPS[kept])
    if max_containers is not None and np.count_nonzero(steps > 0) > max_containers:
        raise JSONError(Fault.SIZE)
    if max_depth is not None and np.cumsum(steps, dtype=np.int32).max(initial=0) > max_depth:
        raise JSONError(Fault.DEPTH)


def _refuse_constant(name: str) -> NoReturn:
    raise JSONError(Fault.CONSTANT, name)


def _check_characters(text: str) -> None:
    """Refuse half a character, in JSON that has been parsed: backslashes stand in texts alone there."""
    whole = _WHOLE.match(text)
    if whole is not None and whole.end() < len(text):
        raise JSONError(Fault.HALF, text[whole.end() : whole.end() + _HALF], text, whole.end())
