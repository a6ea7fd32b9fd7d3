"""Lines of a batch's input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.openai import Endpoint
from inlay.batch import requests as lines
from inlay.batch.requests import BatchLine, LineError, parse_line
from tests.raising import raises

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def test_line_is_parsed():
    data = json.dumps(GOOD).encode()
    assert parse_line(data + b"\r\n") == BatchLine("a", Endpoint.COMPLETIONS, {"prompt": "x"})
    assert parse_line(b"\xef\xbb\xbf" + data, first=True).custom_id == "a"


@pytest.mark.parametrize(
    ("data", "custom_id", "sentence"),
    [
        (b"hello", None, "this is not JSON (Expecting value at column 1); write {"),
        (b'{"custom_id": "a"', None, "this is not JSON (Expecting ',' delimiter at column 18); write {"),
        (b"[1]", None, "this is a list of 1; write {"),
        (b"\xff{}", None, "byte 1 of the line is not UTF-8; save the file as UTF-8"),
        (b"\xef\xbb\xbf{}", None, "this is not JSON ("),
        (b"[" * 100_000, None, "the JSON is nested too deeply; nest it less"),
        (b'{"custom_id": NaN}', None, "this is not JSON (NaN is no value of JSON)"),
        (b'{"custom_id": "\\ud800"}', None, "a text holds half a character"),
        (b'{"custom_id": "a", "custom_id": "b"}', None, "the line gives 'custom_id' twice in one object; keep one of"),
        (b'{"custom_id": ' + b"1" * 5000 + b"}", None, "this is not JSON (a number of more than 4,300 digits); write"),
        (without("custom_id"), None, "there is no custom_id; write a text that no other line has"),
        ({**GOOD, "custom_id": 7}, None, "custom_id is 7; write a text that no other line has"),
        ({**GOOD, "custom_id": ""}, None, "custom_id is ''; write a text that no other line has"),
        ({**GOOD, "customid": 7}, "a", "a line has no field 'customid'; its fields are custom_id, method, url, body"),
        (without("url"), "a", "there is no url; write {"),
        (without("body"), "a", "there is no body; write {"),
        ({**GOOD, "method": "GET"}, "a", "method is 'GET'; write \"POST\""),
        (
            {**GOOD, "url": "/v1/images"},
            "a",
            "url is '/v1/images'; inlay answers /v1/chat/completions and /v1/",
        ),
        ({**GOOD, "url": ["/v1/completions"]}, "a", "url is a list of 1; inlay answers"),
    ],
)
def test_invalid_line_is_rejected(data, custom_id, sentence: str):
    with pytest.raises(LineError) as caught:
        parse_line(data if isinstance(data, bytes) else json.dumps(data).encode())
    assert str(caught.value).startswith(sentence)
    assert caught.value.custom_id == custom_id


def test_overlong_line_is_rejected(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 20)
    with raises("batch.line_too_long", LineError, names="20"):
        parse_line(b" " * 21)


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_random_bytes_raise_a_project_error(data: bytes):
    with pytest.raises(LineError):
        parse_line(data)
