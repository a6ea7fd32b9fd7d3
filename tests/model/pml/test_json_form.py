"""The JSON form: the same as PML, and lossless."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import UserDict
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inlay.pml
from inlay.errors import ParameterError
from inlay.pml import Argument, Import, Module, Prompt, Schema, Text, numbered, resolve
from inlay.pml.json_form import json_schema
from tests.generated import examples
from tests.raising import raises
from tests.unit.pml.helpers import LEVELS, TRAVEL, sentences, shorthand
from tests.unit.pml.json_documents import SURF, TRIP, TRIP_PML
from tests.unit.pml.node_strategies import HERE, TEXTS, bare, prompts, schemas

VALIDATOR = jsonschema.Draft202012Validator(json_schema())

# texts that JSON can carry and PML cannot: any character, adjacent texts, white space beside turns
ANY_TEXTS = TEXTS | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


def test_a_schema() -> None:
    schema = Schema.from_json(json.dumps(TRIP))
    assert bare(schema) == bare(Schema.from_string(TRIP_PML))
    assert schema.to_pml() == TRIP_PML


def test_a_prompt() -> None:
    prompt = Prompt.from_json(json.dumps(SURF))
    built = Schema.from_json(TRIP).prompt().use("plan", inlay.pml.use("miami"), "Soon.", duration="3 days")
    assert bare(prompt) == bare(built.text("Where can we surf?").user("And ", "then?").build())
    assert shorthand(resolve(Schema.from_json(TRIP), prompt))[5:9] == ["[3 days]", ".\n", "Go to Miami.\n", "+Soon."]


def test_written_json_has_a_stable_form() -> None:
    assert (
        Prompt.from_json(SURF).to_json()
        == """\
{
  "schema": "trip",
  "content": [
    {
      "import": "plan",
      "arguments": {"duration": "3 days"},
      "content": [{"import": "miami"}, "Soon."]
    },
    "Where can we surf?",
    {"role": "user", "content": ["And ", "then?"]}
  ]
}
"""
    )
    written = Schema.from_json(TRIP).to_json()
    assert '{"param": "duration", "len": 5, "default": ""}' in written
    assert '{"module": "miami", "content": "Go to Miami.\\n"},\n' in written
    assert written.endswith('  "scaffolds": [["plan", "budget"]]\n}\n')
    assert max(map(len, written.splitlines())) <= 100
    assert Schema("s", ()).to_json() == '{"name": "s", "content": []}\n'
    assert Schema("s", ()).prompt().text("é\0").build().to_json() == '{"schema": "s", "content": "é\\u0000"}\n'


@settings(max_examples=examples(150), deadline=None)
@given(schemas(ANY_TEXTS, neighbours=True))
def test_a_schema_reads_back(schema: Schema) -> None:
    assert bare(Schema.from_json(schema.to_json())) == bare(schema)


@settings(max_examples=examples(150), deadline=None)
@given(prompts(ANY_TEXTS, neighbours=True))
def test_a_prompt_reads_back(prompt: Prompt) -> None:
    assert bare(Prompt.from_json(prompt.to_json())) == bare(prompt)


@settings(max_examples=examples(60), deadline=None)
@given(schemas())
def test_pml_to_json_to_pml(schema: Schema) -> None:
    pml = schema.to_pml()
    written = Schema.from_string(pml).to_json()
    VALIDATOR.validate(json.loads(written))
    assert Schema.from_json(written).to_pml() == pml


@pytest.mark.parametrize("pml", [TRAVEL, LEVELS, TRIP_PML])
def test_pml_of_the_other_tests(pml: str) -> None:
    schema = Schema.from_string(pml)
    assert bare(Schema.from_json(schema.to_json())) == bare(schema)


def test_documents_are_accepted_in_every_form(tmp_path: Path) -> None:
    expected = bare(Schema.from_json(TRIP))
    text = json.dumps(TRIP)
    path = tmp_path / "trip.JSON"
    path.write_text(text)
    for document in (
        text,
        text.encode(),
        bytearray(text.encode()),
        "\ufeff" + text,
        b"\xef\xbb\xbf" + text.encode(),
        UserDict(TRIP),
    ):
        assert bare(Schema.from_json(document)) == expected
    assert bare(Schema.from_file(path)) == expected
    assert Schema.from_file(path).source == str(path)
    path.write_text(json.dumps(SURF))
    assert bare(Prompt.from_file(str(path))) == bare(Prompt.from_json(SURF))


def test_tuples_equal_lists_and_null_equals_a_missing_value() -> None:
    one = {"name": "s", "content": ("a", {"module": "m", "content": None, "src": None}), "scaffolds": None}
    assert bare(Schema.from_json(one)) == bare(Schema.from_string('<schema name="s">a<module name="m"/></schema>'))
    two = {"schema": "s", "content": [{"import": "m", "arguments": None, "content": None}]}
    assert bare(Prompt.from_json(two)) == bare(Prompt.from_string('<prompt schema="s"><m/></prompt>'))


def test_text_is_verbatim_and_empty_text_is_dropped() -> None:
    schema = Schema.from_json({"name": "s", "content": ["\n  a\n  ", "", " \n "]})
    assert [child.text for child in schema.children] == ["\n  a\n  ", " \n "]
    chat = Schema.from_json({"name": "s", "content": [{"role": "user"}, ""]})
    assert len(chat.children) == 1


def test_src(tmp_path: Path) -> None:
    (tmp_path / "unit.py").write_text("a < b\n")
    document = {"name": "s", "content": [{"module": "unit.py", "src": "unit.py"}]}
    (tmp_path / "s.json").write_text(json.dumps(document))
    for schema in (Schema.from_file(tmp_path / "s.json"), Schema.from_json(document, folder=tmp_path)):
        assert bare(schema.modules["unit.py"].children) == (("Text", "a < b\n", 1),)
        assert json.loads(schema.to_json())["content"] == [{"module": "unit.py", "content": "a < b\n"}]


def test_error_locations_are_json_paths() -> None:
    schema = Schema.from_json(TRIP, source="trip.json")
    union = 'trip.json: content[1].user.content[0].module "plan".content[3].union'
    assert str(schema.modules["miami"].place) == f'{union}[0].module "miami"'
    prompt = Prompt.from_json({"schema": "trip", "content": [{"import": "plan"}, {"import": "maimi"}]}, source="p.json")
    assert sentences(lambda: resolve(schema, prompt)) == [
        'p.json: content[1].import "maimi": schema "trip" has no module "maimi"; did you mean <miami/>?'
    ]
    other = Schema.from_json({"name": "other"})
    assert sentences(lambda: resolve(other, prompt))[0].startswith("p.json: schema: the prompt is for schema")


def test_nodes_that_cannot_be_written() -> None:
    twice = Schema("s", numbered((Module("m", (), HERE), Module("m", (), HERE))))
    with raises("pml.not_writable", ParameterError, names='content[1].module "m"'):
        twice.to_json()
    prompt = Prompt("s", (Import("a", (Argument("x", "1", HERE), Argument("x", "2", HERE)), (), HERE),))
    with raises("pml.duplicate_argument", ParameterError, names='"a"'):
        prompt.to_json()
    deep = Module("m", (), HERE)
    for number in range(300):
        deep = Module(f"m{number}", (deep,), HERE)
    with raises("pml.too_deep", ParameterError):
        Schema("s", (deep,)).to_json()
    with raises("pml.not_writable", ParameterError):
        Schema("s", (Text("\ud800", HERE),)).to_json()


def test_reading_pml_imports_no_pydantic() -> None:
    code = (
        "import sys; import inlay; from inlay.pml import Schema; "
        "Schema.from_string('<schema name=\"s\"/>').prompt().build().to_pml(); print('pydantic' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
