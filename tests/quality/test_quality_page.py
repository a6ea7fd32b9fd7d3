"""docs/quality.md: its Python reads what its command writes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from inlay.cli.main import main

from ..pages import DOCS, blocks

PAGE = DOCS / "quality.md"


def of(language: str) -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == language]


def test_answers_are_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in "\n".join(of("sh")).splitlines() if "--answers" in line]
    command = line.replace("--questions 500", "--questions 5").replace("--documents 6", "--documents 2")
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    capsys.readouterr()
    (code,) = of("python")
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    for start in ("off packed single", "isolated packed count", "anchored packed form"):
        assert start in printed
