"""``inlay convert``: both forms, both documents, and one sentence for each error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inlay.pml import Prompt, Schema, json_form
from inlay.pml.json_form import json_schema
from tests.commands import run

SCHEMA = '<schema name="s">\n  Always.\n  <module name="a"/>\n</schema>\n'
PROMPT = '<prompt schema="s">\n  <a/>\n  And now?\n</prompt>\n'


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.xml").write_text(SCHEMA)
    Path("p.xml").write_text(f"<!-- <schema> -->{PROMPT}")
    Path("s.json").write_text(Schema.from_string(SCHEMA).to_json())
    Path("p.json").write_text(Prompt.from_string(PROMPT).to_json())


@pytest.mark.parametrize("name", ["s", "p"])
def test_conversion_round_trips(capsys, name):
    as_json, as_pml = Path(f"{name}.json").read_text(), {"s": SCHEMA, "p": PROMPT}[name]
    assert run(capsys, "convert", f"{name}.xml") == (0, as_json, "")
    assert run(capsys, "convert", f"{name}.json") == (0, as_pml, "")
    assert run(capsys, "convert", f"{name}.xml", "--to", "pml") == (0, as_pml, "")
    assert run(capsys, "convert", f"{name}.json", "--to", "json") == (0, as_json, "")


def test_to_a_file(capsys):
    assert run(capsys, "convert", "s.xml", "--output", "new.json") == (0, "", "")
    assert Path("new.json").read_bytes() == Path("s.json").read_bytes()
    assert run(capsys, "convert", "s.xml", "--output", "new.xml") == (0, "", "")
    assert Path("new.xml").read_text() == SCHEMA


def test_existing_file_is_kept(capsys):
    Path("new.json").write_text("mine")
    sentence = "inlay: new.json exists; choose another name, or overwrite it with --force\n"
    assert run(capsys, "convert", "s.xml", "--output", "new.json") == (2, "", sentence)
    assert Path("new.json").read_text() == "mine"
    assert run(capsys, "convert", "s.xml", "--output", "new.json", "--force") == (0, "", "")
    assert Path("new.json").read_text() == Path("s.json").read_text()


def test_file_is_converted_in_place(capsys):
    Path("s.json").write_text(json.dumps(json.loads(Path("s.json").read_text()), indent=8))
    assert run(capsys, "convert", "s.json", "--to", "json", "--output", "s.json", "--force") == (0, "", "")
    assert Path("s.json").read_text() == Schema.from_string(SCHEMA).to_json()


def test_src_is_found_next_to_the_file(capsys):
    Path("folder").mkdir()
    Path("folder/a.py").write_text("a < b\n")
    Path("folder/s.json").write_text('{"name": "s", "content": [{"module": "m", "src": "a.py"}]}')
    status, out, _ = run(capsys, "convert", "folder/s.json")
    assert (status, out) == (0, '<schema name="s">\n  <module name="m">\n    a &lt; b\n  </module>\n</schema>\n')


PROBLEMS = {
    "no file": (["none.json"], "none.json: no such file; check the path"),
    "broken PML": (["broken.xml"], "broken.xml:1:1: the outermost tag is <shema>, not <schema>"),
    "broken JSON": (["broken.json"], "broken.json:1:2: a key in double"),
    "neither": (["list.json"], "list.json: this is an empty list; a schema is an object"),
    "a form": (["s.xml", "--to", "yaml"], "--to is 'yaml'; use one of json, pml"),
    "a name that does not fit": (
        ["s.xml", "--to", "json", "--output", "new.xml"],
        "--to is json and --output new.xml; JSON is read from files whose names end in .json alone, "
        "and PML from others: change one of them",
    ),
    "no folder": (
        ["s.xml", "--output", "none/new.json"],
        "none/new.json: there is no folder none; make it first",
    ),
    "what PML cannot express": (["nul.json"], 'schema "s" holds the character U+0000 at index 0'),
}


@pytest.mark.parametrize(("arguments", "sentence"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_problems(capsys, arguments, sentence):
    Path("broken.xml").write_text("<shema/>")
    Path("broken.json").write_text("{name: 1}")
    Path("list.json").write_text("[]")
    Path("nul.json").write_text('{"name": "s", "content": "\\u0000"}')
    status, out, err = run(capsys, "convert", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"inlay: {sentence}")
    assert err.count("\n") == 1


def test_json_schema(capsys):
    status, out, _ = run(capsys, "schema", "json-schema")
    assert (status, json.loads(out)) == (0, json_schema())
    assert out == (Path(json_form.__file__).parent / "pml.schema.json").read_text(encoding="utf-8")
