"""The worked example in docs/guides/schema-from-a-log.md equals the output and files of the command."""

from __future__ import annotations

import re
from pathlib import Path

from inlay.cli import main as command_line

PAGE = (Path(__file__).parents[3] / "docs/guides/schema-from-a-log.md").read_text(encoding="utf-8")


def block(prefix: str) -> str:
    """The fenced block that begins so, without its fences."""
    match = re.search(rf"^{re.escape(prefix)}(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert match, prefix
    return match[1]


def test_the_worked_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("ferry.jsonl").write_text(block("```jsonl\n"), encoding="utf-8")
    command, _, expected = block("```\n$ inlay ").partition("\n")
    assert command_line.main(command.split()) == 0
    out = capsys.readouterr().out
    assert [line.rstrip() for line in out.splitlines()] == expected.splitlines()
    assert Path("ferry.xml").read_text(encoding="utf-8") == block("```xml\n")
