"""A command line of chosen commands, for tests of commands by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import typer


def command_line(monkeypatch: pytest.MonkeyPatch, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Let ``inlay.cli.main.main`` see these commands and no others. Their names are one word, or a group and one."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    groups: dict[str, typer.Typer] = {}
    for name, command in commands.items():
        group, _, word = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer()
            app.add_typer(groups[group], name=group)
        (groups[group] if group else app).command(word)(command)
    monkeypatch.setattr("inlay.cli.main.app", app)
