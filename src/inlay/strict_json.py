"""A strict JSON reader for all JSON from outside, with located errors.

It accepts only UTF-8, and no NaN, repeated keys or lone surrogates. Parsers disagree about repeated keys, so a proxy
that checks bodies may have checked the other one. Nesting and the numbers of containers, fields and values are bounded.
An empty container takes 2 bytes of JSON and 60 of memory, and Python's parser blocks all other threads until it ends.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import numpy as np

from inlay.errors import PortableError

Pairs = list[tuple[str, Any]]

_LONG = b"0" * 400  # digits of a number that is slow to convert
_MANY = 2**15  # values that are parsed without a break, in a millisecond or two
_DIGITS = bytes.maketrans(b"0123456789", b"0" * 10)
_STRUCTURE = b'"[]{}:,'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_QUOTE = _STRUCTURE[0]
_STEPS = np.zeros(256, np.int8)  # how each byte changes the depth
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_COLON, _COMMA = b":,"

# Matches all text before a lone surrogate, without backtracking: pairs of surrogates, and everything else.
_WHOLE = re.compile(
    r"(?:[^\\]++|\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?!u[dD][89a-fA-F]).))*+", re.DOTALL
)
_HALF = 6  # characters of an escape: \ud83d


class JsonFault(Enum):
    """Reasons to reject JSON."""

    ENCODING = "it is not UTF-8"
    SYNTAX = "it is not JSON"
    CONSTANT = "it holds NaN or Infinity"
    TWICE = "a key stands twice in one object"
    HALF = "a text holds half a character, a lone surrogate"
    NUMBER = "a whole number is longer than Python converts"
    DEPTH = "lists and objects are nested too deeply"
    SIZE = "there are too many lists and objects"
    FIELDS = "there are too many fields"
    VALUES = "there are too many values"


class JSONError(PortableError):
    """Rejected JSON. The caller words the message for its user.

    Args:
        fault: the reason.
        detail: Python's message for a syntax error. Otherwise the constant, key or surrogate.
        index: the place, in bytes for ENCODING and otherwise in characters. None if unknown.
        line, column: the place from 1, columns in characters.
        bound: the caller's bound that was exceeded. None for Python's own or another fault.
    """

    def __init__(
        self, fault: JsonFault, detail: str = "", text: str = "", index: int | None = None, *, bound: int | None = None
    ) -> None:
        super().__init__(f"{fault.value}: {detail}" if detail else fault.value)
        self.fault = fault
        self.detail = detail
        self.bound = bound
        self.index = index
        self.line = self.column = None if index is None else 1
        if index is not None:
            self.line = text.count("\n", 0, index) + 1
            self.column = index - text.rfind("\n", 0, index)


def unique(pairs: Pairs) -> dict[str, Any]:
    """Return an object of these keys and values. Raises JSONError for a repeated key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise JSONError(JsonFault.TWICE, repeated(pairs)[0])
    return made


def repeated(pairs: Pairs) -> tuple[str, ...]:
    """Return the repeated keys, in order."""
    return tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)


def decode(data: bytes | bytearray) -> str:
    """Decode UTF-8. Raises JSONError with the fault ENCODING."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise JSONError(JsonFault.ENCODING, index=error.start) from None


def read_json(
    data: bytes | bytearray,
    *,
    max_depth: int | None = None,
    max_containers: int | None = None,
    max_fields: int | None = None,
    max_values: int | None = None,
    make_object: Callable[[Pairs], dict[str, Any]] = unique,
    make_integer: Callable[[str], int | float] = int,
) -> Any:
    """Read JSON in UTF-8. Raises JSONError.

    Args:
        max_depth: the deepest nesting. None for Python's limit.
        max_containers: the most lists and objects.
        max_fields: the most fields of all objects.
        max_values: the most commas.
        make_object: builds an object from its keys and values.
        make_integer: converts the digits of a whole number.
    """
    text = decode(data)
    _check_structure(data, max_depth, max_containers, max_fields, max_values)
    many = data.count(b",") > _MANY
    if make_integer is int and (many or _LONG in data.translate(_DIGITS)):
        make_integer = _whole
    try:
        value = json.loads(
            text,
            object_pairs_hook=make_object,
            parse_constant=_refuse_constant,
            parse_int=make_integer,
            parse_float=_real if many else None,
        )
    except json.JSONDecodeError as error:
        raise JSONError(JsonFault.SYNTAX, error.msg, text, error.pos) from None
    except RecursionError:
        raise JSONError(JsonFault.DEPTH) from None
    except ValueError:  # int() rejects long numbers
        raise JSONError(JsonFault.NUMBER) from None
    if b"\\ud" in data or b"\\uD" in data:
        _check_characters(text)
    return value


def _whole(digits: str) -> int:
    """A Python function, so that other threads can run between conversions of many or long numbers."""
    return int(digits)


def _real(digits: str) -> float:
    """See ``_whole``."""
    return float(digits)


def _check_structure(
    data: bytes | bytearray,
    max_depth: int | None,
    max_containers: int | None,
    max_fields: int | None,
    max_values: int | None,
) -> None:
    """Reject too deep or too large JSON before it is parsed. Correct up to the first syntax error.

    Works on whole arrays, because a loop over the characters of 8 MiB would take half a second.
    """
    opened = data.count(b"[") + data.count(b"{")
    most = (
        (opened, max_depth),
        (opened, max_containers),
        (data.count(b":"), max_fields),
        (data.count(b","), max_values),
    )
    if all(bound is None or count <= bound for count, bound in most):
        return  # true even if some of these stand in strings
    if b"\\" in data:  # Removing escaped backslashes first leaves only those that escape a quotation mark.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = np.frombuffer(data.translate(None, _OTHERS), np.uint8)
    # outside strings; the uint8 sum may wrap, because 256 is even
    kept = kept[np.cumsum(kept == _QUOTE, dtype=np.uint8) & 1 == 0]
    steps = _STEPS[kept]
    for found, bound, fault in (
        (steps > 0, max_containers, JsonFault.SIZE),
        (kept == _COLON, max_fields, JsonFault.FIELDS),
        (kept == _COMMA, max_values, JsonFault.VALUES),
    ):
        if bound is not None and np.count_nonzero(found) > bound:
            raise JSONError(fault, bound=bound)
    if max_depth is not None and np.cumsum(steps, dtype=np.int32).max(initial=0) > max_depth:
        raise JSONError(JsonFault.DEPTH, bound=max_depth)


def _refuse_constant(name: str) -> NoReturn:
    raise JSONError(JsonFault.CONSTANT, name)


def _check_characters(text: str) -> None:
    """Reject lone surrogates in JSON that has been parsed. Backslashes occur only in strings there."""
    whole = _WHOLE.match(text)
    if whole is not None and whole.end() < len(text):
        raise JSONError(JsonFault.HALF, text[whole.end() : whole.end() + _HALF], text, whole.end())
