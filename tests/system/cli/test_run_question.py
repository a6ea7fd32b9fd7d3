"""``inlay run MODEL QUESTION``: one question about text files, from the command line or a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import pipe, run
from tests.system.cli.test_cli import PROMPT, SCHEMA

DOCUMENTS = Path("examples/folder/documents").resolve()
BRAVEL, MONAR = DOCUMENTS / "bravel.txt", DOCUMENTS / "monar.txt"
TINY = ("run", "random:tiny", "--max-tokens", "2")


def test_answer_about_documents_is_printed_alone(capsys):
    documents = ("--document", str(BRAVEL), "--document", str(MONAR))
    status, out, err = run(capsys, "run", "demo", "Who is the mayor of Monar?", *documents, "--store", "off")
    assert (status, out) == (0, "Pavel Brinos\n")
    assert "tokens cached" in err


@pytest.mark.parametrize("question", [("-",), ()])
def test_question_is_read_from_standard_input(capsys, monkeypatch, question):
    pipe(monkeypatch, "Well?\n")
    status, out, _ = run(capsys, *TINY, *question, "--json")
    piped = json.loads(out)
    status, out, _ = run(capsys, *TINY, "Well?", "--json")
    assert status == 0
    assert piped["token_ids"] == json.loads(out)["token_ids"]


def test_documents_are_modules_and_can_be_compared_with_no_reuse(capsys):
    status, out, _ = run(capsys, *TINY, "Well?", "--document", str(BRAVEL), "--compare", "--json")
    row = json.loads(out)
    assert status == 0
    assert row["module_tokens"] + row["exact_tokens"] >= len(BRAVEL.read_text())
    assert row["baseline"]["cached_tokens"] == 0


@pytest.mark.parametrize("others", [0, 1])
def test_documents_beyond_the_context_are_named(tmp_path, capsys, others):
    long = tmp_path / "long.txt"
    long.write_text("word " * 20_000)
    documents = ("--document", str(long), *("--document", str(BRAVEL)) * others)
    status, out, err = run(capsys, "run", "demo", "Well?", *documents, "--store", "off")
    assert (status, out) == (2, "")
    assert f"--document {long}" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("run s.xml", "s.xml is taken as a schema"),
        ("run s.xml Well?", "s.xml is taken as a schema"),
        ("run s.xml Well? --prompt p.xml", "s.xml is taken as a schema"),
        ("run s.xml --prompt p.xml --document p.xml", "--document"),
        ("run none.xml Well?", "none.xml: no such file"),
        ("run random:tiny Well? --model demo", "random:tiny is taken as a model"),
        ("run random:tiny Well? --document none.txt", "none.txt"),
        ("run random:tiny -", "question"),
        ("run ./nowhere Well?", "./nowhere"),
    ],
)
def test_mistake_explains_the_first_argument(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    pipe(monkeypatch, "")
    (tmp_path / "s.xml").write_text(SCHEMA)
    (tmp_path / "p.xml").write_text(PROMPT)
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (2, "")
    (sentence,) = err.splitlines()
    assert named in sentence
