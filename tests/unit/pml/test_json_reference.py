"""The examples of docs/reference/pml-json.md give the output on the page."""

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest

from inlay.cli.main import main
from inlay.pml import Prompt, Schema, resolve
from inlay.pml.json_form import json_schema
from tests.unit.pml.helpers import sentences, shorthand
from tests.unit.pml.node_strategies import bare

PAGE = (Path(__file__).parents[3] / "docs/reference/pml-json.md").read_text(encoding="utf-8")


def block(start: str, number: int = 0) -> str:
    return re.findall(rf"^```{start}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[number]


@pytest.fixture
def trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Schema:
    """The page's schema, which is also the file trip.json of the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("trip.json").write_text(block("json schema"), encoding="utf-8")
    return Schema.from_file("trip.json")


def test_the_schema_and_its_prompt(trip: Schema) -> None:
    assert trip.to_json() == block("json schema")
    prompt = Prompt.from_json(block("json prompt"))
    assert prompt.to_json() == block("json prompt")
    assert shorthand(resolve(trip, prompt)) == [
        *("<system", "You plan trips.\n", "</system"),
        *("<user", "Plan a trip of ", "[3 days]", ".\n", "Go to Miami.\n", "+Where can we surf?", "</user"),
    ]
    for text in (block("json schema"), block("json prompt")):
        jsonschema.validate(json.loads(text), json_schema())


def test_the_table_of_objects() -> None:
    """Each form of the table is read, once names and values are put into it."""
    forms = re.findall(r"^\| `(\{.*?\})` \|", PAGE, re.MULTILINE)
    values = {"name": '"n"', "file": '"f"', "tokens": "5", "modules": '{"module": "n"}', "role": '"user"'}
    values["imports"] = '{"import": "n"}'
    keys = {"content": '"x"', "default": '""', "scaffold": '""', "arguments": "{}"}
    kinds = []
    for form in forms:
        written = re.sub(r'"(\w+)"\?', lambda match: f'"{match[1]}": {keys[match[1]]}', form)
        written = re.sub(
            r'(?<!")\b(name|file|tokens|modules|imports|role)\b(?!")', lambda match: values[match[1]], written
        )
        node = json.loads(written)
        kinds.append(next(iter(node)))
        root = {"schema": "s"} if node.keys() & {"import", "set"} else {"name": "s"}
        jsonschema.validate(
            {**root, "content": [{"module": "m", "content": [node]} if "param" in node else node]}, json_schema()
        )
    assert kinds == ["module", "module", "param", "union", "role", "import", "set"]


def test_python(trip: Schema) -> None:
    names: dict[str, object] = {}
    exec(block("python"), names)
    assert bare(names["schema"]) == bare(trip)
    exec(block("python", 1), names)
    listed = re.search(r"\.keys\(\)  # (.*)", block("python", 1))
    assert listed is not None
    assert sorted(json_schema()["$defs"]) == listed[1].split(", ")


def test_command_line_examples_run(trip: Schema, capsys: pytest.CaptureFixture[str]) -> None:
    for line in block("sh").splitlines():
        assert main(shlex.split(line, comments=True)[1:]) == 0
    printed = capsys.readouterr().out
    assert printed == trip.to_pml() + trip.to_json()
    assert bare(Schema.from_file("trip.xml")) == bare(Schema.from_file("trip.json")) == bare(trip)


def test_errors() -> None:
    problems = sentences(lambda: Schema.from_json(block("json wrong"), source="trip.json"))
    assert problems == block("text").splitlines()
