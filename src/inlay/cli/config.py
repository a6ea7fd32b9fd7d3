"""``inlay config``: shows the settings of a command, with the origin of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.declared import known_settings
from inlay.cli.options import AsJson
from inlay.cli.settings import with_settings
from inlay.errors import ParameterError
from inlay.settings import COMMANDS, SERVE, check_choice

if TYPE_CHECKING:
    from inlay.cli.sources import SettingValue
    from inlay.settings import Setting

app = typer.Typer(help="Show settings and where they come from.", no_args_is_help=True)


@app.callback()
def _config() -> None:
    """Show settings and where they come from."""


@app.command()
@with_settings(None)
def show(
    command: Annotated[
        str,
        typer.Argument(
            metavar="[COMMAND]",
            help=f"The command whose settings are shown: {', '.join(COMMANDS)}. warm is inlay cache warm.",
            autocompletion=lambda: list(COMMANDS),
        ),
    ] = SERVE,
    given: Annotated[bool, typer.Option("--given", help="Leave out settings at their default.")] = False,
    as_json: AsJson = False,
    *,
    flags: Mapping[str, Any],
    config: Path | None,
) -> None:
    """Print what holds for a command, and the origin of each value: a flag, the environment, a file, or the default.

    It reads the same options, environment and --config as the command. Secrets are hidden.
    """
    from inlay.cli.sources import unknown_variables, values_of

    known = known_settings(check_choice("COMMAND", command, COMMANDS))
    for key in flags:
        if key not in known:
            flag = known_settings()[key].flag
            raise ParameterError(f"inlay {command} has no option {flag}; leave it out", code="config.unknown_key")
    values = values_of(command, flags, config)
    rows = {key: _row(known[key], one) for key, one in values.items() if one.given or not given}
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
    else:
        width = max(map(len, rows), default=0)
        for key, row in rows.items():
            text = "not set" if row["value"] is None else json.dumps(row["value"], ensure_ascii=False)
            print(f"{key:{width}} = {text}  ({row['origin']})")
    for line in unknown_variables():
        print(f"inlay: {line}", file=sys.stderr)


def _row(one: Setting, found: SettingValue) -> dict[str, Any]:
    value = found.value
    if isinstance(value, list | tuple):
        value = [str(each) for each in value] or None
    if one.secret and value is not None:
        value = "(hidden)"
    return {"value": str(value) if isinstance(value, Path) else value, "origin": found.origin}
