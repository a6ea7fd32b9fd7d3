"""``inlay schema lint``: its lines, its JSON, its exit status, and its findings on the examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run

EXAMPLES = Path(__file__).parents[3] / "examples"
SCHEMA = """<schema name="s">
  <module name="a">Small.</module>
  <module name="b">Long enough for anyone, with <param name="p" len="4"/></module>
</schema>
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.xml").write_text(SCHEMA)
    Path("sound.xml").write_text('<schema name="sound">All is well.</schema>')
    Path("bad.xml").write_text('<schema name="bad"><modul name="a">x</modul></schema>')
    Path("p.xml").write_text('<prompt schema="s">\n<b p="too long"/></prompt>')
    return tmp_path


def test_lines(files, capsys):
    status, out, err = run(
        capsys, "schema", "lint", "s.xml", "sound.xml", "--model", "random:tiny", "--prompts", "p.xml"
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split(": ")[:2] for line in lines[:2]] == [
        ["p.xml:2:4", "long-argument"],
        ["s.xml:2:3", "small-module"],
    ]
    assert lines[2] == "sound.xml: no advice"


def test_strict(files, capsys):
    assert run(capsys, "schema", "lint", "s.xml", "--model", "random:tiny", "--strict")[0] == 1
    assert run(capsys, "schema", "lint", "s.xml", "--model", "random:tiny", "--strict", "--small", "6")[0] == 0
    assert run(capsys, "schema", "lint", "sound.xml", "--model", "random:tiny", "--strict")[0] == 0


def test_json(files, capsys):
    status, out, err = run(
        capsys, "schema", "lint", "s.xml", "bad.xml", "sound.xml", "--model", "random:tiny", "--json"
    )
    assert (status, err, len(out.splitlines())) == (1, "", 1)
    result = json.loads(out)
    first, bad, sound = result["files"]
    assert (first["file"], first["schema"], first["problems"]) == ("s.xml", "s", [])
    (finding,) = first["findings"]
    assert (finding["rule"], finding["file"], finding["line"], finding["column"]) == ("small-module", "s.xml", 2, 3)
    assert finding["message"].startswith("module 'a' has 6 tokens")
    assert (bad["schema"], bad["findings"], bad["problems"][0]["line"]) == (None, [], 1)
    assert (sound["schema"], sound["findings"], sound["problems"]) == ("sound", [], [])


def test_wrong_files_are_errors(files, capsys):
    """As in ``inlay schema check``; a default that is too long shows only with a tokenizer."""
    Path("default.xml").write_text(SCHEMA.replace('len="4"', 'len="4" default="five5"'))
    status, out, err = run(
        capsys, "schema", "lint", "bad.xml", "default.xml", "none.xml", "s.xml", "--model", "random:tiny"
    )
    assert status == 1
    assert [line.split(": ")[0] for line in err.splitlines()] == ["bad.xml:1:20", "default.xml:3:49", "none.xml"]
    assert "the default of 'p' is 5 tokens long and its len is 4" in err
    assert out.startswith("s.xml:2:3: small-module")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("schema lint", "Missing argument 'files'"),
        ("schema lint s.xml --prompts none.xml", "none.xml: no such file"),
        (
            "schema lint sound.xml --prompts p.xml",
            "p.xml:1:9: the prompt is of schema 's' and the schemas given are sound; give",
        ),
        ("schema lint s.xml --model ./nowhere", "./nowhere: no such directory"),
        ("schema lint s.xml --model random:tiny --small -1", "small is -1; it must be"),
        ("schema lint s.xml --small few", "Invalid value for '--small'"),
        ("schema lint s.xml --fix", "No such option: --fix"),
    ],
)
def test_errors_are_one_sentence(files, capsys, arguments, sentence):
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert sentence in err


def test_the_examples(capsys, monkeypatch):
    """These findings are right: each was checked by hand."""
    monkeypatch.chdir(EXAMPLES.parent)
    schemas = [f"examples/{name}/{name}.xml" for name in ("docs", "records", "trip")]
    prompts = [part for name in ("docs", "records", "trip") for part in ("--prompts", f"examples/{name}/prompt.xml")]
    status, out, _ = run(capsys, "schema", "lint", *schemas, *prompts, "--json")
    assert status == 0
    said = {
        Path(report["file"]).stem: [
            (finding["rule"], finding["message"].split("'")[1]) for finding in report["findings"]
        ]
        for report in json.loads(out)["files"]
    }
    assert said == {
        "docs": [],
        "records": [("small-module", "capitals"), ("small-module", "sentence")],
        "trip": [("argument-first", "plan"), ("early-parameter", "plan")],
    }


def test_deviations_of_modules_are_printed(files, capsys):
    options = ("--model", "random:tiny", "--small", "0", "--profile")
    status, out, _ = run(capsys, "schema", "lint", "s.xml", *options)
    assert status == 0
    lines = out.splitlines()
    assert [line.rpartition(" ")[0] for line in lines[-2:]] == [
        f"s.xml: module '{name}' depends on others by" for name in "ab"
    ]
    _, out, _ = run(capsys, "schema", "lint", "s.xml", *options, "--json")
    (file,) = json.loads(out)["files"]
    assert {name: f"{moved:.2f}" for name, moved in file["deviation"].items()} == {
        name: line.rpartition(" ")[2] for name, line in zip("ab", lines[-2:], strict=True)
    }
    assert file["sensitivity"] == file["deviation"], "the former name, for one release"
    assert "deviation" not in json.loads(run(capsys, "schema", "lint", "s.xml", "--json")[1])["files"][0]
