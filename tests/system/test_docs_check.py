"""docs/guides/check-prompts.md: its commands and its Python run, and its lines of prompts are read."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from inlay import Schema
from inlay.cli.check import prompts_file
from inlay.cli.main import main
from inlay.pml import resolve
from inlay.prompt.inputs import has_modules
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.long

PAGE = DOCS / "guides/check-prompts.md"
SMALL = ("--quick", "--seconds", "0.001", "--json")


def of(language: str) -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == language]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path))


@pytest.mark.parametrize("command", [line for block in of("sh") for line in block.splitlines() if "eval" not in line])
def test_commands_run(command, monkeypatch, capsys):
    monkeypatch.chdir(DOCS.parent)
    assert main([*shlex.split(command)[1:], *SMALL]) == 0
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])) == ["rows", "recommended", "reason"]


def test_lines_of_prompts_are_read(tmp_path):
    lines, chats = of("json")
    path = tmp_path / "prompts.jsonl"
    path.write_text(chats)
    (chat,) = prompts_file(path, None)
    assert has_modules(chat)
    path.write_text(lines)
    schema = Schema.from_file(Path(DOCS.parent, "examples/docs/docs.xml"))
    one, other = prompts_file(path, schema)
    assert resolve(schema, one).items
    assert [child.name for child in one.children[:1]] == [child.name for child in other.children[:1]]


def test_without_a_measurement_auto_is_exact():
    (block,) = of("python")
    exec(block, names := {})
    assert str(names["llm"].policy()) == "exact"
