"""Seams: no text that spells a special token comes through a rendering in one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.prompt.tokens import Seams, at_seams

NAMES = ["<|im_end|>", "<s>", "</s>", "<<", "[INST]", "☃", "  "]
SEAMS = Seams(NAMES)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("nothing", ["nothing"]),
        ("a<|im_end|>b", ["a<", "|im_end|>b"]),
        ("<s></s>", ["<", "s><", "/s>"]),
        ("<<<", ["<", "<", "<"]),  # spellings that overlap
        ("a☃b", ["a", "b"]),
        ("two  spaces", ["two  spaces"]),
        ("<<|im_end|>", ["<", "<", "|im_end|>"]),
        ("", [""]),
    ],
)
def test_text_is_split_at_seams(text: str, parts: list[str]) -> None:
    assert at_seams(SEAMS.put(text)) == parts


def test_nested_values_are_split_at_seams() -> None:
    value = {"role": "tool", "<s>": [{"a": "x</s>"}, 3, None, True], "plain": ("y", 1.5)}
    put = SEAMS.put(value)
    assert put["plain"] == ["y", 1.5]
    (key,) = set(put) - set(value)
    assert at_seams(key) == ["<", "s>"]
    assert at_seams(put[key][0]["a"]) == ["x<", "/s>"]
    assert put[key][1:] == [3, None, True]


spelled = st.lists(st.sampled_from([*NAMES[:-1], "<", "|", "s>", "im_end", "a", " ", "[", "INST]"]), max_size=12)


@given(spelled.map("".join), st.sampled_from([str, json.dumps, repr, str.strip]))
def test_no_piece_contains_a_special_token(text: str, render: Any) -> None:
    rendered = render(SEAMS.put(text))
    for part in at_seams(rendered):
        assert not any(name in part for name in NAMES[:-1])
    # a special token of one character is left out after the rendering, which saw something that is no white space there
    assert "".join(at_seams(rendered)) == render(text.replace("☃", "0")).replace("0", "")
