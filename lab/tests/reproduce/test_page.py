"""docs/reproduction.md: its commands are accepted, and its report has every experiment and its figure."""

from __future__ import annotations

import re
import shlex

import pytest

from inlay.cli.main import main
from inlay_lab.reproduce import published
from inlay_lab.reproduce.catalog import EXPERIMENTS
from inlay_lab.reproduce.report import figure
from tests.pages import DOCS, blocks

PAGE = (DOCS / "reproduction.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in blocks(DOCS / "reproduction.md") if block.language == "sh" for line in block.text.split("\n")
]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command])
def test_commands(command, tmp_path, monkeypatch, capsys):
    """Each is only parsed; tests/reproduce runs a few of them."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[:2] == ["inlay", "reproduce"]
    assert main([*words[1:], "--list"]) == 0
    assert "paired-quality" in capsys.readouterr().out


def test_every_experiment_has_its_section():
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    for each in EXPERIMENTS.values():
        assert f"`inlay reproduce --only {each.name}`" in sections[each.title], each.name
        assert each.source in sections[each.title]
        measured = "Measured on" in sections[each.title] or "MiB a token" in sections[each.title]
        assert bool(re.search(r"!\[.*\]\(images/", sections[each.title])) == (measured and each.draw is not None)


def test_nothing_failed():
    assert "**Failed**" not in PAGE


def test_drawings_are_there():
    drawings = re.findall(r"\]\((images/[^)]*)\)", PAGE)
    assert len(drawings) >= 5
    assert all((DOCS / each).stat().st_size < 200_000 for each in drawings)


@pytest.mark.parametrize("one", [published.FIRST_TIMES, published.CPU_TIMES, published.COPY_HOST_TO_HOST])
def test_published_figures_are_those_of_the_package(one):
    assert re.search(rf"\| {re.escape(figure(one.value, '×').rstrip('×'))}[× ]", PAGE)
