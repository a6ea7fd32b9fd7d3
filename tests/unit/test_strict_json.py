"""Strict JSON is parsed as Python's parser does; each error names its position, in bounded time."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inlay import strict_json
from inlay.strict_json import JSONError, JsonFault, read_json

MOST = 8
structure = st.text(alphabet='[]{}",:\\1na \n', max_size=60)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values, st.booleans())
def test_json_is_parsed_as_python_does(value: Any, escaped: bool) -> None:
    data = json.dumps(value, ensure_ascii=escaped).encode()
    assert read_json(data) == json.loads(data)


def depth_of(text: str) -> int:
    """How deep a reader has been in this text by its end, or by the first mistake in it; character by character."""
    around, deepest, inside, escaped = [], 0, False, False
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
            around.append(character)
            deepest = max(deepest, len(around))
        elif character in "]}" and (not around or around.pop() + character not in ("[]", "{}")):
            break
    return deepest


@given(structure, st.integers(1, 12))
@example("[" * 20, 8)
@example('["[[[[[[[[["]', 8)
@example('["\\"[[[[[[[[["]', 8)
@example('["\\\\",[[[[[[[[1]]]]]]]]]', 8)
@example("[" + '"' * 512 + "[" * 9, 8)
def test_too_deep_nesting_never_reaches_the_parser(text: str, most: int) -> None:
    """For any text, valid or not, the parser never gets more nesting than the limit."""
    if depth_of(text) > most:
        with pytest.raises(JSONError) as caught:
            read_json(text.encode(), max_depth=most)
        assert caught.value.fault is JsonFault.DEPTH
        return
    with suppress(JSONError):
        assert read_json(text.encode(), max_depth=most) == json.loads(text)


@given(st.binary(max_size=40))
def test_any_bytes_give_a_value_or_a_project_error(data: bytes) -> None:
    with suppress(JSONError):
        read_json(data)


@given(st.text(st.sampled_from("\\ud83DdeEcC0 x"), max_size=30), st.text(max_size=3))
@example("\\\\ud800", "")
@example("\\ud83d\\ude00", "\n")
@example("\\ude00\\ud83d", "")
def test_lone_surrogates_are_located(escapes: str, before: str) -> None:
    data = f'[{json.dumps(before, ensure_ascii=False)},\n"{escapes}"]'.encode()
    try:
        value = json.loads(data)
    except ValueError:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(JSONError) as caught:
            read_json(data)
        assert caught.value.fault is JsonFault.HALF
        assert data.decode()[caught.value.index :].startswith(caught.value.detail)
    else:
        assert read_json(data) == value


@pytest.mark.parametrize(
    ("data", "fault", "detail", "line", "column"),
    [
        (b'{\n"a" 1}', JsonFault.SYNTAX, "Expecting ':' delimiter", 2, 5),
        (b"", JsonFault.SYNTAX, "Expecting value", 1, 1),
        (b'{"a": NaN}', JsonFault.CONSTANT, "NaN", None, None),
        (b'{"a": [-Infinity]}', JsonFault.CONSTANT, "-Infinity", None, None),
        (b"[" + b"9" * 100_000 + b"]", JsonFault.NUMBER, "", None, None),
        (b'{"n": {"x": 1, "y": 2, "x": 1}}', JsonFault.TWICE, "x", None, None),
        ('["é",\n "\\ud83d"]'.encode(), JsonFault.HALF, "\\ud83d", 2, 3),
        (b'{"a": ' * 9 + b"1" + b"}" * 9, JsonFault.DEPTH, "", None, None),
        (b"[" + b"[]," * 100 + b"1]", JsonFault.SIZE, "", None, None),
    ],
)
def test_invalid_json_is_located(
    data: bytes, fault: JsonFault, detail: str, line: int | None, column: int | None
) -> None:
    with pytest.raises(JSONError) as caught:
        read_json(data, max_depth=MOST, max_containers=100)
    error = caught.value
    assert (error.fault, error.detail, error.line, error.column) == (fault, detail, line, column)


def test_bytes_without_utf8_are_rejected() -> None:
    with pytest.raises(JSONError) as caught:
        read_json(b'{"a": "\xff"}')
    assert (caught.value.fault, caught.value.index) == (JsonFault.ENCODING, 7)


def test_nesting_beyond_pythons_limit_is_rejected() -> None:
    with pytest.raises(JSONError) as caught:
        read_json(b"[" * 100_000 + b"]" * 100_000)
    assert caught.value.fault is JsonFault.DEPTH


def test_brackets_in_strings_do_not_count_as_nesting() -> None:
    data = json.dumps({"a": '[{"\\' * 1_000, "b": "[" * 100}).encode()
    assert read_json(data, max_depth=1, max_containers=1) == json.loads(data)


def test_custom_objects_and_integers_can_be_made() -> None:
    made = read_json(b'{"a": 1, "a": 23}', make_object=list, make_integer=len)  # type: ignore[arg-type]
    assert made == [("a", 1), ("a", 2)]


@pytest.mark.parametrize(("number", "many"), [("7", True), ("0.5", True), ("7", False)])
def test_other_threads_can_run_while_many_numbers_are_parsed(number, many):
    """Python's parser holds the interpreter for as long as it runs, 0.1 s a million numbers; functions give it up."""
    count, calls = (50_000 if many else 1000), 0

    def counted(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename == strict_json.__file__

    data = f"[{','.join([number] * count)}]".encode()
    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        value = read_json(data)
    finally:
        sys.setprofile(before)
    assert value == [json.loads(number)] * count
    assert (calls >= count) == many
