"""Bodies of JSON are parsed as Python's parser does; invalid ones get one sentence in bounded time."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inlay.api.failures import BodyError
from inlay.server.body import MAX_CONTAINERS, MAX_FIELDS, MAX_VALUES, parse_json

MOST = 8
structure = st.text(alphabet='[]{}",:\\1na \n', max_size=60)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def depth_of(text: str) -> int:
    """How deep a reader has been in this text by its end, or by the first mistake in it; character by character."""
    open_, deepest, inside, escaped = [], 0, False, False
    for character in text:
        if escaped:
            escaped = False
        elif inside:
            escaped, inside = character == "\\", character != '"'
        elif character == "\\":
            break
        elif character == '"':
            inside = True
        elif character in "[{":
            open_.append(character)
            deepest = max(deepest, len(open_))
        elif character in "]}" and (not open_ or open_.pop() + character not in ("[]", "{}")):
            break
    return deepest


def nested(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    return 1 + max((nested(one) for one in (value.values() if isinstance(value, dict) else value)), default=0)


@given(values, st.booleans())
def test_json_is_parsed_as_python_does(value: Any, escaped: bool):
    data = json.dumps(value, ensure_ascii=escaped).encode(errors="replace")
    if nested(value) <= MOST:
        assert parse_json(data, MOST) == json.loads(data)
    else:
        with pytest.raises(BodyError, match="more than 8 deep"):
            parse_json(data, MOST)


@given(structure, st.integers(1, 12))
@example("[" * 20, 8)
@example('["[[[[[[[[["]', 8)
@example('["\\"[[[[[[[[["]', 8)
@example('["\\\\",[[[[[[[[1]]]]]]]]]', 8)
@example('["\\\\\\"[[[[[[[[[[[["]', 8)
@example("[" + '"' * 512 + "[" * 9, 8)
def test_too_deep_nesting_never_reaches_the_parser(text: str, most: int):
    """For any text, valid or not, the parser never gets more nesting than the limit."""
    if depth_of(text) > most:
        with pytest.raises(BodyError, match=f"more than {most} deep"):
            parse_json(text.encode(), most)
        return
    try:
        value = parse_json(text.encode(), most)
    except BodyError:
        return
    assert not text.strip() or value == json.loads(text)


@given(st.binary(max_size=40))
def test_any_bytes_give_a_value_or_one_sentence(data: bytes):
    with suppress(BodyError):
        parse_json(data, MOST)


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_empty_body_is_none(data: bytes):
    assert parse_json(data, MOST) is None


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'{\n"a" 1}', "is not JSON (Expecting ':' delimiter at line 2, column 5); correct it"),
        (b"prompt=hello", "is not JSON (Expecting value at line 1, column 1)"),
        (b'{"a": "\xff"}', "is not UTF-8 from byte 8 on; encode it as UTF-8"),
        ('{"a": "é"}'.encode("utf-16"), "is not UTF-8 from byte 1 on"),
        (b'{"a": NaN}', "holds NaN, which is not a JSON value"),
        (b'{"a": [-Infinity]}', "holds -Infinity, which is not a JSON value"),
        (b"[" + b"9" * 100_000 + b"]", "holds a number of more than 4,300 digits"),
        (b'{"model": "a", "n": {"x": 1, "y": 2, "x": 1}}', 'gives "x" twice in one object; keep one of them'),
        (b'{"a": "\\ud83d"}', "holds half a character (a lone surrogate)"),
        (b'{"\\uDE00\\uD83D": 1}', "holds half a character (a lone surrogate)"),
        (b'{"a": ' * 9 + b"1" + b"}" * 9, "nests lists and objects more than 8 deep; nest them less deeply"),
        (b"[" * 100_000, "nests lists and objects more than 8 deep"),
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", "holds more than 100,000 lists and objects; send several requests"),
        (b'["",' + b"1," * MAX_VALUES + b"1]", "holds more than 1,048,576 values; send several requests"),
        (b"{" + b'"a":1,' * MAX_FIELDS + b'"b":1}', "holds more than 100,000 fields; send several requests"),
    ],
)
def test_invalid_json_is_one_sentence(data: bytes, sentence: str):
    with pytest.raises(BodyError) as caught:
        parse_json(data, MOST)
    assert str(caught.value).startswith(f"the body {sentence}")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_brackets_in_strings_do_not_count_as_nesting():
    data = json.dumps({"a": '[{"\\' * (MAX_CONTAINERS + 1), "b": "[" * 100, "c": ",:" * (MAX_VALUES + 1)}).encode()
    assert parse_json(data, 1) == json.loads(data)


def test_whole_characters_may_be_escaped():
    assert parse_json(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud83d"}', MOST) == {"a": "😀", "b": "\\ud83d"}


def test_nesting_beyond_pythons_limit_is_one_sentence():
    with pytest.raises(BodyError, match="nests lists and objects too deeply"):
        parse_json(b"[" * 90_000 + b"]" * 90_000, 1_000_000)


def test_long_numbers_are_numbers():
    assert parse_json(b'{"a": [' + b"9" * 4_000 + b", -1, 0.5]}", MOST) == {"a": [10**4_000 - 1, -1, 0.5]}
