"""Commands of other distributions: found through entry points, and named where inlay-lab is not installed."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from inlay.cli import main as plugins
from inlay.cli.main import main


@pytest.fixture
def without_lab(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    app = typer.Typer()
    plugins.add_plugins(app)
    return app


@pytest.mark.parametrize("arguments", [("bench", "ttft", "--model", "demo"), ("eval", "--help"), ("simulate",)])
def test_a_missing_lab_is_named_with_the_line_that_installs_it(without_lab: typer.Typer, arguments: tuple[str, ...]):
    result = CliRunner().invoke(without_lab, list(arguments))
    assert result.exit_code != 0
    assert f"inlay {arguments[0]}" in str(result.exception)
    assert "pip install ./lab" in str(result.exception)


def test_the_commands_of_an_installed_lab_run(capsys: pytest.CaptureFixture[str]):
    for name in plugins.LAB:
        assert main([name, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out


def test_another_distribution_adds_a_command(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("shout", f"{__name__}:shout", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    app = typer.Typer()
    plugins.add_plugins(app)
    assert CliRunner().invoke(app, ["shout", "hey"]).output == "HEY\n"


def shout(word: str) -> None:
    print(word.upper())
