"""docs/guides/configuration.md: its file is valid, and its command prints the shown lines."""

from __future__ import annotations

import shlex

from tests.commands import run
from tests.pages import DOCS, blocks

PAGE = DOCS / "guides" / "configuration.md"


def test_the_example_prints_the_shown_lines(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INLAY_STORE")
    (file,) = (block.text for block in blocks(PAGE) if block.language == "toml")
    (tmp_path / "inlay.toml").write_text(file)
    (shown,) = (block.text for block in blocks(PAGE) if block.language == "console")
    command, _, printed = shown.partition("\n")
    _, variable, _, *arguments = shlex.split(command)
    monkeypatch.setenv(*variable.split("="))
    assert run(capsys, *arguments) == (0, printed.rstrip("\n") + "\n", "")
