"""``inlay models``: lists the supported families and the features of each. ``inlay pull`` downloads a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AsJson, announce_hub

if TYPE_CHECKING:
    from inlay.models.family import Allows


app = typer.Typer(help="List the families of models that are served, and what may be asked of each.")

Row = dict[str, Any]


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the model families: served with reuse, served without reuse, and not served, with the reason."""
    if context.invoked_subcommand is not None:
        return
    from inlay.models.multimodal import MULTIMODAL
    from inlay.models.unshared import REASONS, WHY

    rows = family_rows()
    if as_json:
        without, refused = ({kind: why for why, of in each.items() for kind in of} for each in (WHY, REASONS))
        by_text = {"by_their_text_models": MULTIMODAL}
        print(json.dumps({"families": rows, **by_text, "without_reuse": without, "refused": refused}))
        return
    _print_table(rows)
    print(f"\nServed by their text models, without images and sound: {', '.join(MULTIMODAL)}.")
    for what, each in (("Served with reuse='off' alone, because", WHY), ("Not served, because", REASONS)):
        print(f"\n{what}")
        for reason, kinds in each.items():
            print(f"- {reason}: {', '.join(sorted(kinds))}.")
    print("\nAny other causal model of transformers is served without reuse, where the probe at load finds it right.")


@app.command()
def show(
    model: Annotated[
        str, typer.Argument(help="A folder with a config.json, a GGUF file, a hub name, random:<shape>, or demo.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the supported features of one model, from its configuration. Loading the model verifies them.

    If serve would refuse a GGUF file or a folder with weights, this command refuses it with the same message.
    """
    from inlay.authoring.memory import CODECS, config_named, shape_of
    from inlay.models.families import check_config, family_of
    from inlay.models.family import note_of
    from inlay.models.load import check_model
    from inlay.models.shapes import SHAPES

    if model in SHAPES or model.startswith("random:") or model == "demo":
        config = config_named(model)
        check_config(config)
    else:
        announce_hub(model)
        config = check_model(model)
    row = _row(config.model_type, family_of(config).allows(config))
    if not row["exact"]:
        _show_without_reuse(model, row, as_json=as_json)
        return
    if not row["modular"]:
        _show_without_modules(model, row, as_json=as_json)
        return
    row["bytes_per_token"] = shape_of(config).bytes_per_token(CODECS["bf16"])
    if as_json:
        print(json.dumps({"model": model} | row))
        return
    print(f"{model} is of the family {row['family']}.")
    print("reuse off and exact: answers are those of the stock model")
    if note := note_of(config):
        print(f"context: {note}")
    print("modules at the positions of their schema: yes")
    print(f"modules at other positions: {'yes, by ' + row['shifts'] if row['shifts'] else 'no; ' + row['reason']}")
    windows = ", ".join(f"{window:,}" for window in row["windows"])
    print(
        f"sliding windows: {windows + ' positions' if windows else 'none'}; sinks: {'yes' if row['sinks'] else 'none'}"
    )
    print(f"a cached token takes {row['bytes_per_token']:,} bytes in bfloat16{_latent_note(row)}")


def _show_without_reuse(model: str, row: Row, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"model": model} | row))
        return
    print(f"{model} is of the family {row['family']}.")
    print("reuse off: answers are those of the stock model, which transformers' own code computes")
    print(f"reuse exact, and modules: no; {row['reason']}")


def _show_without_modules(model: str, row: Row, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"model": model} | row))
        return
    print(f"{model} is of the family {row['family']}.")
    print("reuse off and exact: answers are those of the stock model")
    print(f"modules: no; {row['reason']}. A prompt that begins like an earlier one continues its state")


def family_rows() -> list[Row]:
    """Return a row for each supported model type, by name."""
    from transformers import CONFIG_MAPPING

    from inlay.models.families import FAMILIES

    return [
        _row(kind, family.allows(CONFIG_MAPPING[kind](**family.typical))) for kind, family in sorted(FAMILIES.items())
    ]


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


def pull(
    model: Annotated[str, typer.Argument(help="A name on the hub, such as Qwen/Qwen2.5-0.5B-Instruct.")],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit; main, if not given.")] = None,
) -> None:
    """Download a model, or its missing files, and print the folder.

    From then on every command finds the model by name.
    """
    from inlay.models.pull import pull as download

    print(download(model, revision))
