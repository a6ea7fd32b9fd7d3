"""docs/quality.md: its commands run, and its Python reads the output of one of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from inlay.cli.main import main
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.long

PAGE = DOCS / "quality.md"


def of(language: str) -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == language]


LINES = [line for block in of("sh") for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("inlay eval")]
OTHERS = [line for line in LINES if line not in COMMANDS]


def run_small(command: str) -> int:
    """Run a command of the page with fewer questions over fewer documents."""
    return main([*shlex.split(command)[1:], "--documents", "2", "--questions", "5", "--json"])


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--answers" not in command])
def test_commands_run(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run_small(command) == 0
    assert bool(list(tmp_path.glob("*/report.md"))) == ("--report" in command)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["scaffold"] for row in rows} == ({False, True} if "--scaffold" in command else {False})


@pytest.mark.parametrize("command", OTHERS)
def test_what_a_repair_costs(command: str, capsys: pytest.CaptureFixture[str]):
    words = shlex.split(command)
    assert words[:3] == ["inlay", "bench", "ttft"]
    assert main([*words[1:], "--model", "random:tiny", "--cached", "128", "--new", "8", "--quick", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["repaired"] > 0
    assert row["over_behind"] > 0


def test_answers_are_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in COMMANDS if "--answers" in command]
    assert run_small(command) == 0
    capsys.readouterr()
    (code,) = of("python")
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    for start in ("off packed False single", "isolated packed False count", "anchored packed False form"):
        assert start in printed
