"""The end of a JSON value in a growing text, against Python's own parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.tools.readers import JSONEnd, parsed
from inlay.strict_json import JSONError

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(['"', "\\", '\\"}', "}{", "😀"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
containers = st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=4), values, max_size=4)


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[:last] for last in edges[1:]]


@given(containers, st.text(max_size=10), st.lists(st.integers(0, 1000), max_size=8), st.booleans(), st.booleans())
def test_end_of_json_equals_pythons_parser(value, behind, cuts, ascii_only, indented):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=2 if indented else None)
    expected = json.JSONDecoder().raw_decode(text + behind)[1]
    end = JSONEnd()
    found = None
    for grown in pieces(text + behind, cuts):
        found = end.find(grown)
        if found is not None:
            break
    assert found == expected == len(text)
    assert not end.broken
    assert parsed(text) == value


@given(containers, st.booleans())
def test_prefix_of_valid_json_is_not_broken(value, ascii_only):
    """Each of them is looked at as JSONEnd looks at a text that has doubled."""
    text = json.dumps({"a" * 70: value}, ensure_ascii=ascii_only)
    for length in range(65, len(text)):
        end = JSONEnd(length)
        assert end.find(text[:length]) is None
        assert not end.broken, text[:length]


BROKEN = ['{"a" x', '["a" <', "[1 2", "[1,,", "{1", "[01", '["\\q', '["\n', '{"a": "b" "c"', "[" * 300]


@pytest.mark.parametrize("text", BROKEN)
def test_invalid_json_is_detected_before_the_text_doubles(text: str):
    end = JSONEnd()
    grown = text + "[" * max(64, 2 * len(text))
    assert end.find(grown) is None
    assert end.broken


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "[1", '{"a": "\\ud800"}', "[" * 300 + "]" * 300, ""])
def test_invalid_json_values_are_rejected(text: str):
    with pytest.raises(JSONError):
        parsed(text)


def test_time_grows_with_the_text_alone(monkeypatch):
    """Nothing is looked at twice by the scan, and the parser is asked whenever the text has doubled."""
    from inlay.api.tools import readers

    asked: list[int] = []
    monkeypatch.setattr(readers, "may_become_json", lambda text: asked.append(len(text)) or True)
    end, text = JSONEnd(), '["' + "x" * 10_000
    for length in range(len(text)):
        end.find(text[:length])
    assert asked == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
