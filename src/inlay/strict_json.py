"""Strict JSON: bytes → a value, or what is wrong with them and where. Every part of inlay reads JSON from outside so.

Stricter than Python's own parser: UTF-8 alone, no NaN, no key twice (which of the two counts differs from parser to
parser, so a proxy that checks bodies may have checked the other), no halves of characters, and bounds on nesting and on
how many lists and objects (an empty one takes 2 bytes of JSON and 60 of memory), fields and values there are: Python's
parser lets no other thread run until it is through with all of them.
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

_LONG = b"0" * 400  # digits of a number that takes a while to convert
_MANY = 2**15  # values that are parsed without a break: a millisecond or two
_DIGITS = bytes.maketrans(b"0123456789", b"0" * 10)
_STRUCTURE = b'"[]{}:,'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_QUOTE = _STRUCTURE[0]
_STEPS = np.zeros(256, np.int8)  # how each byte changes the depth
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_COLON, _COMMA = b":,"

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
    FIELDS = "there are too many fields"
    VALUES = "there are too many values"


class JSONError(PortableError):
    """JSON that is not taken. Who reads it says so in a sentence of its own.

    fault: what is wrong.
    detail: Python's words for a mistake of syntax; the constant, the key or the half of a character that it is about.
    index: where it stands, in bytes for ENCODING and else in characters; None where that is not known.
    line, column: the same, from 1; columns in characters.
    bound: the reader's own one that there is more than; None where it is Python's, or the fault is another.
    """

    def __init__(
        self, fault: Fault, detail: str = "", text: str = "", index: int | None = None, *, bound: int | None = None
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
    """An object of these keys and values. Raises JSONError where a key stands twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise JSONError(Fault.TWICE, repeated(pairs)[0])
    return made


def repeated(pairs: Pairs) -> tuple[str, ...]:
    """The keys that stand more than once among these, in order."""
    return tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)


def decode(data: bytes | bytearray) -> str:
    """The text that bytes are in UTF-8. Raises JSONError, its fault ENCODING."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise JSONError(Fault.ENCODING, index=error.start) from None


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
    """The value that JSON in UTF-8 holds. Raises JSONError.

    max_depth: how many lists and objects may be inside each other; as many as Python can read, if not given.
    max_containers: how many lists and objects there may be. max_fields: and fields of objects, all together.
    max_values: how many commas there may be.
    make_object: what becomes of an object's keys and values; make_integer: of a whole number's digits.
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
        raise JSONError(Fault.SYNTAX, error.msg, text, error.pos) from None
    except RecursionError:
        raise JSONError(Fault.DEPTH) from None
    except ValueError:  # of int(), which takes long for long numbers
        raise JSONError(Fault.NUMBER) from None
    if b"\\ud" in data or b"\\uD" in data:
        _check_characters(text)
    return value


def _whole(digits: str) -> int:
    """Long numbers take a while, and so do many; by a function of Python's, others have their turn between two."""
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
    """Refuse what nests too deeply or holds too much, before it is parsed. Right for JSON, and up to its first mistake.

    Looks at whole arrays: a loop over the characters of 8 MiB would take half a second.
    """
    opened = data.count(b"[") + data.count(b"{")
    most = (
        (opened, max_depth),
        (opened, max_containers),
        (data.count(b":"), max_fields),
        (data.count(b","), max_values),
    )
    if all(bound is None or count <= bound for count, bound in most):
        return  # and this is so whatever of it stands in texts
    if b"\\" in data:  # pairs of backslashes first: what then stands before a quotation mark escapes it
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = np.frombuffer(data.translate(None, _OTHERS), np.uint8)
    kept = kept[np.cumsum(kept == _QUOTE, dtype=np.uint8) & 1 == 0]  # outside of texts; it wraps around at 256, an even
    steps = _STEPS[kept]
    for found, bound, fault in (
        (steps > 0, max_containers, Fault.SIZE),
        (kept == _COLON, max_fields, Fault.FIELDS),
        (kept == _COMMA, max_values, Fault.VALUES),
    ):
        if bound is not None and np.count_nonzero(found) > bound:
            raise JSONError(fault, bound=bound)
    if max_depth is not None and np.cumsum(steps, dtype=np.int32).max(initial=0) > max_depth:
        raise JSONError(Fault.DEPTH, bound=max_depth)


def _refuse_constant(name: str) -> NoReturn:
    raise JSONError(Fault.CONSTANT, name)


def _check_characters(text: str) -> None:
    """Refuse half a character, in JSON that has been parsed: backslashes stand in texts alone there."""
    whole = _WHOLE.match(text)
    if whole is not None and whole.end() < len(text):
        raise JSONError(Fault.HALF, text[whole.end() : whole.end() + _HALF], text, whole.end())
