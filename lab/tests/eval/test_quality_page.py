"""The pages on methods and results: commands run at small sizes, and the Python reads the output of one of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from inlay.cli.main import main
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.long

METHODS, RESULTS = DOCS / "internals/methods.md", DOCS / "internals/results.md"
LINES = [
    line
    for page in (METHODS, RESULTS)
    for block in blocks(page)
    if block.language == "sh"
    for line in block.text.splitlines()
]
EVALS = [line for line in LINES if line.startswith("inlay eval modular-qa")]
FILES = [shlex.split(line)[1] for line in LINES if line.startswith("python ")]
READING = [line for line in LINES if line.startswith("inlay eval reading")]
TTFT = [line for line in LINES if line.startswith("inlay bench ttft") and "profiled" in line]
REPEAT = "--repeat"


def run_small(command: str) -> int:
    """Run a command of the page with fewer questions over fewer documents."""
    return main([*shlex.split(command)[1:], "--documents", "2", "--questions", "5", "--json"])


@pytest.mark.parametrize("command", [command for command in EVALS if "--answers" not in command])
def test_commands_run(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "lab").symlink_to(DOCS.parent / "lab")
    monkeypatch.chdir(tmp_path)
    assert run_small(command) == 0
    assert bool(list(tmp_path.glob("*/report.md"))) == ("--report" in command)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["scaffold"] for row in result["rows"]} == ({False, True} if "--scaffold" in command else {False})
    assert (REPEAT in command) == ("repeated" in result)


@pytest.mark.parametrize("command", READING)
def test_commands_over_generated_passages_run(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([*shlex.split(command)[1:], "--questions", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["questions"] == 2
    assert ({"choice", "citation"} <= set(result["rows"][-1])) == ("choice" in command)


@pytest.mark.parametrize("command", TTFT)
def test_the_cost_of_recomputation(command: str, capsys: pytest.CaptureFixture[str]):
    small = ["--model", "random:tiny", "--cached", "128", "--new", "8", "--quick", "--json"]
    assert main([*shlex.split(command)[1:], *small]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["repaired"] > 0
    assert row["over_behind"] > 0


def test_the_scripts_exist():
    assert len(FILES) > 10
    assert [file for file in FILES if not (DOCS.parent / file).is_file()] == []


def test_answers_are_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in EVALS if "--answers" in command]
    assert run_small(command) == 0
    capsys.readouterr()
    (code,) = [block.text for block in blocks(METHODS) if block.language == "python"]
    exec(compile(code, str(METHODS), "exec"), {})
    printed = capsys.readouterr().out
    for start in ("off packed False single", "isolated packed False count", "anchored packed False form"):
        assert start in printed
