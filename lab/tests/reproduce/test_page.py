"""The pages on methods and results: commands of ``inlay reproduce`` are accepted, and the experiments exist."""

from __future__ import annotations

import shlex

import pytest

from inlay.cli.main import main
from inlay_lab.reproduce.catalog import EXPERIMENTS
from tests.pages import DOCS, blocks, rows

COMMANDS = [
    line
    for block in blocks(DOCS / "internals/methods.md")
    if block.language == "sh"
    for line in block.text.splitlines()
    if line.startswith("inlay reproduce")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path, monkeypatch, capsys):
    """Each is only parsed; tests/reproduce runs a few of them."""
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[1:], "--list"]) == 0
    assert "paired-quality" in capsys.readouterr().out


def test_the_experiments_of_the_results_exist():
    table = rows(DOCS / "internals/results.md", "experiment", "source", "figure", "published", "here")
    named = {name.strip("`"): source for name, source, *_ in table}
    assert len(named) > 10
    for name, source in named.items():
        assert source.split(",")[0] == EXPERIMENTS[name].source.split(",")[0], name
