"""The bytes of a request's body → a value of JSON, in one parse and bounded time, or a sentence that says why not.

Stricter than Python's parser: UTF-8 alone, no NaN, no key twice (which of the two counts differs from parser to parser,
so a proxy that checks bodies may have checked the other), no halves of characters, and bounds on nesting and on how
many lists and objects there are (an empty one takes 2 bytes of a body and 60 of memory).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

import numpy as np

from inlay.openai.failures import BodyError
from inlay.pml.problems import lone_surrogate

MAX_CONTAINERS = 100_000  # lists and objects, as many as PML may have elements

_STRUCTURE = b'"[]{}'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_QUOTE = _STRUCTURE[0]
_STEPS = np.zeros(256, np.int8)  # how each byte changes the depth
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def parse_json(data: bytes | bytearray, max_nesting: int) -> Any:
    """The value that a body holds; None for an empty body. Raises BodyError."""
    text = decoded(data)
    if not text or text.isspace():
        return None
    _check_nesting(data, max_nesting)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
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


def _check_nesting(data: bytes | bytearray, most: int) -> None:
    """Refuse what is nested too deeply, before it is parsed. Right for JSON, and up to the first mistake in it.

    Looks at whole arrays: a loop over the characters of 8 MiB would take half a second.
    """
    if data.count(b"[") + data.count(b"{") <= most:
        return
    if b"\\" in data:  # pairs of backslashes first: what then stands before a quotation mark escapes it
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = np.frombuffer(data.translate(None, _OTHERS), np.uint8)
    in_text = np.cumsum(kept == _QUOTE, dtype=np.uint8) & 1  # it wraps around at 256, which is even
    steps = np.where(in_text, np.int8(0), _STEPS[kept])
    if np.count_nonzero(steps > 0) > MAX_CONTAINERS:
        raise _wrong(f"holds more than {MAX_CONTAINERS:,} lists and objects; send several requests")
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > most:
        raise _wrong(f"nests lists and objects more than {most} deep; nest them less deeply")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _wrong(f"gives {_shown(twice)} twice in one object; keep one of them")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise _wrong(f"holds {name}, which is no value of JSON; write a number, or leave it out")


def _check_characters(value: Any) -> None:
    if lone_surrogate(json.dumps(value, ensure_ascii=False)):
        raise _wrong("holds half a character (a lone surrogate); cut texts between characters")


def _shown(name: str) -> str:
    return json.dumps(name if len(name) <= 60 else f"{name[:60]}…")


def _wrong(what: str) -> BodyError:
    return BodyError(f"the body {what}", code="invalid_json")
