"""How messages name values."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Any

import pytest

from inlay.wording import markdown_table, show, shown, shown_python


class Color(Enum):
    RED = "red"


LONG = "x" * 100


@pytest.mark.parametrize(
    ("value", "plain", "with_kind"),
    [
        (None, "null", "null"),
        (True, "true", "true"),
        (3, "3", "the number 3"),
        (1.5, "1.5", "the number 1.5"),
        (10**1000, "a huge number", "a huge number"),
        ("a", "'a'", 'the text "a"'),
        (LONG, f"'{LONG[:58]}…", "a text of 100 characters"),
        ([], "an empty list", "an empty list"),
        ([1] * 1234, "a list of 1,234", "a list of 1,234"),
        ({}, "an empty object", "an object"),
        ({"a": 1}, "an object of 1", "an object"),
    ],
)
def test_values_of_json(value: Any, plain: str, with_kind: str) -> None:
    assert (shown(value), shown(value, kind=True)) == (plain, with_kind)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (Color.RED, "Color.RED"),
        (MappingProxyType({"role": "user"}), "{'role': 'user'}"),
        (LONG, f"'{LONG[:58]}…"),
    ],
)
def test_values_of_python(value: object, text: str) -> None:
    assert shown_python(value) == text


def test_mapping_is_shown_as_a_dict_of_any_size() -> None:
    assert show(MappingProxyType({"role": "user"})) == "{'role': 'user'}"
    assert show(MappingProxyType({"role": LONG * 1000})).startswith("{'role': 'xxx")
    assert len(show(MappingProxyType({"role": LONG * 1000}))) <= 101


def test_a_table_in_markdown() -> None:
    assert markdown_table(["a", "b"], [("1", "2"), ("3", "")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 |  |"
