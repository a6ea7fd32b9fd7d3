"""``inlay models``: which families are served, and what may be asked of each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AsJson, announce_hub

if TYPE_CHECKING:
    from inlay.models.allows import Allows

app = typer.Typer(help="List the families of models that are served, and what may be asked of each.")

Row = dict[str, Any]


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the families that are served, each with its default configuration, and those that are not, and why."""
    if context.invoked_subcommand is not None:
        return
    from inlay.models.refused import REASONS

    rows = family_rows()
    if as_json:
        print(json.dumps({"families": rows, "refused": {kind: why for why, of in REASONS.items() for kind in of}}))
        return
    _print_table(rows)
    print("\nNot served, as")
    for reason, kinds in REASONS.items():
        print(f"- {reason}: {', '.join(sorted(kinds))}.")


@app.command()
def show(
    model: Annotated[str, typer.Argument(help="A directory with a config.json, a hub name, random:<shape>, or demo.")],
    as_json: AsJson = False,
) -> None:
    """Say what may be asked of one model, from its configuration alone. The probe at load proves it."""
    from inlay.advice.memory import CODECS
    from inlay.advice.memory.estimate import config_named
    from inlay.advice.memory.families import shape_of
    from inlay.models.families import check_config, family_of
    from inlay.models.random import SHAPES

    if model not in SHAPES:
        announce_hub(model)
    config = config_named(model)
    check_config(config)
    row = _row(config.model_type, family_of(config).allows(config))
    row["bytes_per_token"] = shape_of(config).bytes_per_token(CODECS["bf16"])
    if as_json:
        print(json.dumps({"model": model} | row))
        return
    print(f"{model} is of the family {row['family']}.")
    print("reuse off and exact: answers are those of the stock model")
    print("modules at the positions of their schema: yes")
    print(f"modules at other positions: {'yes, by ' + row['shifts'] if row['shifts'] else 'no; ' + row['reason']}")
    windows = ", ".join(f"{window:,}" for window in row["windows"])
    print(
        f"sliding windows: {windows + ' positions' if windows else 'none'}; sinks: {'yes' if row['sinks'] else 'none'}"
    )
    print(f"a cached token takes {row['bytes_per_token']:,} bytes in bfloat16{_latent_note(row)}")


def family_rows() -> list[Row]:
    """A row for each model type that is served, by its name."""
    from transformers import CONFIG_MAPPING

    from inlay.models.families import FAMILIES

    return [_row(kind, family.allows(CONFIG_MAPPING[kind]())) for kind, family in sorted(FAMILIES.items())]


def _row(kind: str, allows: Allows) -> Row:
    return {"family": kind} | allows.as_json()


def _latent_note(row: Row) -> str:
    return ": one latent for all heads" if row["latent"] else ""


def _print_table(rows: list[Row]) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console

    table = Table(box=None, pad_edge=False)
    for name in ("family", "exact", "modular", "shifts", "windows", "sinks", "latent", "weights"):
        table.add_column(name, no_wrap=name != "shifts")
    for row in rows:
        windows = ", ".join(f"{window:,}" for window in row["windows"])
        cells = [*(_yes(row[name]) for name in ("exact", "modular")), row["shifts"] or f"no: {row['reason']}", windows]
        cells += [*(_yes(row[name]) for name in ("sinks", "latent")), "joined" if row["joined"] else "packed"]
        table.add_row(row["family"], *cells)
    stdout_console().print(table, markup=False)


def _yes(value: bool) -> str:
    return "yes" if value else ""
