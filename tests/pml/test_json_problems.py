"""The problems of a document in the JSON form are sentences with a place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from inlay.errors import ParameterError
from inlay.pml import Prompt, Schema
from inlay.pml import nodes as limits
from tests.pml.helpers import sentences
from tests.pml.json_documents import PROMPT_PROBLEMS, SCHEMA_PROBLEMS, inside, says
from tests.pml.node_strategies import bare
from tests.raising import raises


@pytest.mark.parametrize(("document", "expected"), SCHEMA_PROBLEMS.values(), ids=SCHEMA_PROBLEMS.keys())
def test_problems_of_schemas(document: Any, expected: list[str]) -> None:
    assert sentences(lambda: Schema.from_json(json.dumps(document), source="s.json")) == expected


@pytest.mark.parametrize(("document", "expected"), PROMPT_PROBLEMS.values(), ids=PROMPT_PROBLEMS.keys())
def test_problems_of_prompts(document: Any, expected: list[str]) -> None:
    assert sentences(lambda: Prompt.from_json(json.dumps(document), source="p.json")) == expected


TEXT_PROBLEMS = {
    "": '1:1: there is nothing here; write {"name": "…"} for a schema, or {"schema": "…"} for a prompt',
    " <schema": "1:1: this is PML, not JSON; read it with from_string, or from a file that does not end in .json",
    '{"name": "s",\n "content": }': "2:13: a value belongs here; write one, or delete the comma before it",
    "{'name': 1}": "1:2: a key in double quotation marks belongs here; write one, or delete the comma before it",
    '{"name" 1}': '1:9: a colon belongs here; write "key": value',
    '{"name": "s" 1}': "1:14: this value or its list or object does not end here; write a comma or close it",
    '{"name": "s"} x': "1:15: something stands after the end of the document; keep one object and nothing after it",
    '{"name": "s': "1:10: a string begins here and does not end; close it",
    '{"name": "s\n"}': "1:12: a line break or control character stands in a string; write \\n or \\u00… for it",
    '{"name": "\\x"}': "1:11: no escape begins like this; write \\\\ for a backslash",
    '{"name": "\\u12"}': "1:12: this escape is not complete; write \\u and four hexadecimal digits",
    '{"name": "é",\n"a": "\\\\\\ud83d"}': "2:9: \\ud83d alone is half a character; write both halves, or leave it out",
    '{"\\uDE00": 1}': "1:3: \\uDE00 alone is half a character; write both halves, or leave it out",
    '{"name": "\ud800"}': "1:11: a lone surrogate is not a character; decode the text properly or leave it out",
    '{"name": NaN}': " NaN is no value of JSON; write a number, or leave it out",
    '{"name": [-Infinity]}': " -Infinity is no value of JSON; write a number, or leave it out",
    '{"name": "s", "content": ' + "[" * 10**5: " objects are nested more than 32 deep; nest less deeply",
    '{"a":' * 10**5: " objects are nested more than 32 deep; nest less deeply",
    '{"name": "s", "name": "s"}': ' the key "name" stands here twice; keep one of them',
    '{"name": "s", "content": [{"module": "m", "content": "a", "content": "b"}]}': (
        ' content[0].module "m": the key "content" stands here twice; keep one of them'
    ),
    '{"name": "s", "x": '
    + "1" * 5000
    + "}": ' a schema takes no key "x"; it takes "name", "content", "scaffolds", "meta"',
}


@pytest.mark.parametrize(("text", "problem"), TEXT_PROBLEMS.items(), ids=[key[:20] for key in TEXT_PROBLEMS])
def test_text_that_is_not_json(text: str, problem: str) -> None:
    assert sentences(lambda: Schema.from_json(text, source="s.json")) == [f"s.json:{problem}"]


@pytest.mark.parametrize("text", ['{"name": "s",}', '{"name": "s", "content": [1,]}'])
def test_a_comma_too_many(text: str) -> None:
    (problem,) = sentences(lambda: Schema.from_json(text, source="s.json"))
    assert problem.startswith("s.json:1:")
    assert "delete the comma" in problem


def test_pairs_of_surrogates_are_characters() -> None:
    schema = Schema.from_json('{"name": "s", "content": "\\ud83d\\ude00 \\\\ud800"}')
    assert bare(schema.children) == (("Text", "😀 \\ud800", 0),)


def test_an_argument_twice() -> None:
    text = '{"schema": "s", "content": [{"import": "a", "arguments": {"x": "1", "x": "2"}}]}'
    assert sentences(lambda: Prompt.from_json(text, source="p.json")) == [
        'p.json: content[0].import "a".arguments: the key "x" stands here twice; keep one of them'
    ]


def test_bytes_that_are_not_utf8() -> None:
    assert sentences(lambda: Schema.from_json(b'{"name":\n "\xff"}', source="s")) == [
        "s:2:3: this is not UTF-8; encode it as UTF-8"
    ]


def nested(depth: int) -> dict[str, Any]:
    module: dict[str, Any] = {"module": f"m{depth}"}
    for level in range(depth - 1, 0, -1):
        module = {"module": f"m{level}", "content": [module]}
    return inside(module)


def problems_of(document: Any, kind: type[Schema] | type[Prompt] = Schema) -> list[str]:
    return sentences(lambda: kind.from_json(json.dumps(document), source="s"))


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    Schema.from_json(nested(31))
    (problem,) = problems_of(nested(32))
    assert problem.endswith('.module "m32": objects are nested more than 32 deep; nest less deeply')
    with raises("parameter.too_deep", ParameterError, names="32"):
        Schema.from_json({"name": "s", "content": nested_list(10**5)})
    monkeypatch.setattr(limits, "MAX_ELEMENTS", 9)
    Schema.from_json(inside(*({"module": f"m{number}"} for number in range(8))))
    assert problems_of(inside(*({"module": f"m{number}"} for number in range(9)))) == [
        's: content[8].module "m8": there are more than 9 objects; split this into several files'
    ]
    monkeypatch.setattr(limits, "MAX_BYTES", 99)
    assert problems_of({"name": "s" * 90}) == ["s: is larger than the 99 bytes that are allowed; split it"]


def nested_list(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def test_many_problems_and_keys() -> None:
    problems = problems_of(inside(*range(10**5)))
    assert len(problems) == 21
    assert problems[-1] == "s: 980 more problems are not shown; correct these first"
    assert problems_of({"name": "s", **{f"k{number}": 1 for number in range(10**5)}}) == [
        "s: an object has more than 1000 keys; write fewer"
    ]
    arguments = {f"k{number}": 1 for number in range(10**5)}
    assert problems_of(says({"import": "a", "arguments": arguments}), Prompt) == [
        's: content[0].import "a".arguments: an object has more than 1000 keys; write fewer'
    ]
    (problem,) = problems_of(inside(*["a"] * 200_001))
    assert problem == "s: content[200000]: there are more than 200000 texts; join neighbouring ones"


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ParameterError) as error:
        call()
    return str(error.value)


def test_what_is_no_document() -> None:
    circle: dict[str, Any] = {"name": "s"}
    circle["content"] = [circle]
    use = "use str, int, list, dict and None"
    assert refusal(lambda: Schema.from_json(circle)) == f"the mapping is no JSON (Circular reference detected); {use}"
    assert refusal(lambda: Schema.from_json({"name": 1j})) == f"the mapping is no JSON (it holds complex); {use}"
    assert refusal(lambda: Prompt.from_json({(): 1})).startswith("the mapping is no JSON (keys must be str")
    assert refusal(lambda: Schema.from_json([])) == (  # type: ignore[arg-type]
        "from_json takes a str, bytes or a mapping, not list; give a path to from_file"
    )
    assert sentences(lambda: Schema.from_json({"name": float("nan")}, source="s")) == [
        "s: NaN is no value of JSON; write a number, or leave it out"
    ]
