"""The problems of a document in the JSON form have a code and a place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inlay.errors import ParameterError
from inlay.pml import Prompt, Schema
from inlay.pml import nodes as limits
from tests.raising import raises
from tests.unit.pml.helpers import faults
from tests.unit.pml.json_documents import PROMPT_PROBLEMS, SCHEMA_PROBLEMS, inside, prompt_of
from tests.unit.pml.node_strategies import bare


@pytest.mark.parametrize(("document", "expected"), SCHEMA_PROBLEMS.values(), ids=SCHEMA_PROBLEMS.keys())
def test_problems_of_schemas(document: Any, expected: list[str]) -> None:
    assert faults(lambda: Schema.from_json(json.dumps(document), source="s.json")) == expected


@pytest.mark.parametrize(("document", "expected"), PROMPT_PROBLEMS.values(), ids=PROMPT_PROBLEMS.keys())
def test_problems_of_prompts(document: Any, expected: list[str]) -> None:
    assert faults(lambda: Prompt.from_json(json.dumps(document), source="p.json")) == expected


TEXT_PROBLEMS = {
    "": "pml.malformed_json 1:1",
    " <schema": "pml.malformed_json 1:1",
    '{"name": "s",\n "content": }': "pml.malformed_json 2:13",
    "{'name': 1}": "pml.malformed_json 1:2",
    '{"name" 1}': "pml.malformed_json 1:9",
    '{"name": "s" 1}': "pml.malformed_json 1:14",
    '{"name": "s"} x': "pml.malformed_json 1:15",
    '{"name": "s': "pml.malformed_json 1:10",
    '{"name": "s\n"}': "pml.malformed_json 1:12",
    '{"name": "\\x"}': "pml.malformed_json 1:11",
    '{"name": "\\u12"}': "pml.malformed_json 1:12",
    '{"name": "é",\n"a": "\\\\\\ud83d"}': "pml.malformed_json 2:9",
    '{"\\uDE00": 1}': "pml.malformed_json 1:3",
    '{"name": "\ud800"}': "pml.invalid_character 1:11",
    '{"name": NaN}': "pml.malformed_json",
    '{"name": [-Infinity]}': "pml.malformed_json",
    '{"name": "s", "content": ' + "[" * 10**5: "pml.malformed_json",
    '{"a":' * 10**5: "pml.malformed_json",
    '{"name": "s", "content": [' + ",".join(["1"] * 1_000_002) + "]}": "pml.too_large",
    '{"name": "s", "name": "s"}': "pml.duplicate_key",
    '{"name": "s", "content": [{"module": "m", "content": "a", "content": "b"}]}': (
        'pml.duplicate_key content[0].module "m"'
    ),
    '{"name": "s", "x": ' + "1" * 5000 + "}": "pml.unknown_key",
}


@pytest.mark.parametrize(("text", "problem"), TEXT_PROBLEMS.items(), ids=[key[:20] for key in TEXT_PROBLEMS])
def test_invalid_json_is_rejected(text: str, problem: str) -> None:
    assert faults(lambda: Schema.from_json(text, source="s.json")) == [problem]


@pytest.mark.parametrize("text", ['{"name": "s",}', '{"name": "s", "content": [1,]}'])
def test_a_comma_too_many(text: str) -> None:
    (problem,) = faults(lambda: Schema.from_json(text, source="s.json"))
    assert problem.startswith("pml.malformed_json 1:")


def test_pairs_of_surrogates_are_characters() -> None:
    schema = Schema.from_json('{"name": "s", "content": "\\ud83d\\ude00 \\\\ud800"}')
    assert bare(schema.children) == (("Text", "😀 \\ud800", 0),)


def test_an_argument_twice() -> None:
    text = '{"schema": "s", "content": [{"import": "a", "arguments": {"x": "1", "x": "2"}}]}'
    assert faults(lambda: Prompt.from_json(text)) == ['pml.duplicate_key content[0].import "a".arguments']


def test_bytes_without_utf8_are_rejected() -> None:
    assert faults(lambda: Schema.from_json(b'{"name":\n "\xff"}')) == ["pml.wrong_encoding 2:3"]


def nested(depth: int) -> dict[str, Any]:
    module: dict[str, Any] = {"module": f"m{depth}"}
    for level in range(depth - 1, 0, -1):
        module = {"module": f"m{level}", "content": [module]}
    return inside(module)


def problems_of(document: Any, kind: type[Schema] | type[Prompt] = Schema) -> list[str]:
    return faults(lambda: kind.from_json(json.dumps(document), source="s"))


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    Schema.from_json(nested(31))
    (problem,) = problems_of(nested(32))
    assert problem.startswith("pml.too_deep")
    assert problem.endswith('.module "m32"')
    with raises("parameter.too_deep", ParameterError, names="32"):
        Schema.from_json({"name": "s", "content": nested_list(10**5)})
    monkeypatch.setattr(limits, "MAX_ELEMENTS", 9)
    Schema.from_json(inside(*({"module": f"m{number}"} for number in range(8))))
    assert problems_of(inside(*({"module": f"m{number}"} for number in range(9)))) == [
        'pml.too_large content[8].module "m8"'
    ]
    monkeypatch.setattr(limits, "MAX_BYTES", 99)
    assert problems_of({"name": "s" * 90}) == ["pml.too_large"]


def nested_list(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def test_many_problems_and_keys() -> None:
    problems = problems_of(inside(*range(10**5)))
    assert len(problems) == 21
    assert problems[-1] == "pml.more_problems"
    assert problems_of({"name": "s", **{f"k{number}": 1 for number in range(10**5)}}) == ["pml.too_large"]
    arguments = {f"k{number}": 1 for number in range(10**5)}
    assert problems_of(prompt_of({"import": "a", "arguments": arguments}), Prompt) == [
        'pml.too_large content[0].import "a".arguments'
    ]
    assert problems_of(inside(*["a"] * 200_001)) == ["pml.too_large content[200000]"]


def test_unusable_documents_are_rejected() -> None:
    circle: dict[str, Any] = {"name": "s"}
    circle["content"] = [circle]
    for mapping in (circle, {"name": 1j}, {(): 1}):
        with raises("parameter.not_json", ParameterError):
            Schema.from_json(mapping)  # type: ignore[arg-type]
    with raises("parameter.wrong_type", ParameterError, names="list"):
        Schema.from_json([])  # type: ignore[arg-type]
    assert faults(lambda: Schema.from_json({"name": float("nan")})) == ["pml.malformed_json"]
