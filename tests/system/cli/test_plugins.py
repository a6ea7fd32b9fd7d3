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
    return plugins.command_line()


@pytest.mark.parametrize("arguments", [("bench", "ttft", "--model", "demo"), ("eval", "--help"), ("simulate",)])
def test_missing_lab_is_named_with_its_install_command(without_lab: typer.Typer, arguments: tuple[str, ...]):
    result = CliRunner().invoke(without_lab, list(arguments))
    assert result.exit_code != 0
    assert f"inlay {arguments[0]}" in str(result.exception)
    assert "pip install ./lab" in str(result.exception)


def test_the_commands_of_an_installed_lab_run(capsys: pytest.CaptureFixture[str]):
    for name in plugins.LAB:
        assert main([name, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out


def test_other_distribution_can_add_a_command(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("shout", f"{__name__}:shout", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    runner = CliRunner()
    assert runner.invoke(plugins.command_line(), ["shout", "hey"]).output == "HEY\n"
    assert "Say it loudly." in runner.invoke(plugins.command_line(), ["--help"]).output


@pytest.mark.parametrize("name", plugins.COMMANDS)
def test_the_list_of_commands_has_the_help_of_each(name: str):
    text = plugins.load_command(name).help
    assert plugins.list_commands()[name] == " ".join(text.partition("\n\n")[0].split())


def shout(word: str) -> None:
    """Say it loudly."""
    print(word.upper())
