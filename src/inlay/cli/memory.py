"""``inlay memory``: computes the memory of a cached token from a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import Adapter, Plot, adapters_of, announce_hub
from inlay.errors import ParameterError
from inlay.wording import counted

if TYPE_CHECKING:
    from inlay.authoring.memory import KVShape, NumberFormat

MIB = 2**20
Row = dict[str, Any]


def memory(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A directory with a config.json, a hub name, random:<shape>, demo, or an architecture of the paper's "
            "table, such as llama-2-7b; several --model give a table."
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Also what this many tokens take.")] = None,
    codec: Annotated[
        str,
        typer.Option(
            help="fp32, bf16, fp16, fp8, int8 or int4. The engine runs fp32, bf16, int8 and, on GPUs, fp8; the "
            "others are plans."
        ),
    ] = "bf16",
    table2: Annotated[
        bool, typer.Option("--table2", help="Prompt Cache's table 2, beside what these models really keep.")
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also what the weights take: in the model's own dtype, int8 and int4.")
    ] = False,
    adapter: Adapter = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")] = False,
) -> None:
    """Print the megabytes (MiB, 2^20 bytes) of keys and values for each cached token, and of the model's weights.

    This reads configurations, and no weights except those of adapters.
    """
    from inlay.authoring.memory import codec_named

    if tokens is not None and tokens < 1:
        raise ParameterError(f"--tokens is {tokens}; it must be at least 1")
    number_format = codec_named(codec)
    if plot is not None:
        from inlay.authoring.plot import check_plot_file

        check_plot_file(plot)
    if table2:
        if model or adapter or weights or tokens is not None or number_format.bits != 16:
            others = "--model, --adapter, --weights, --tokens and --codec"
            raise ParameterError(f"--table2 is the paper's table, at 16 bit; leave {others} out")
        _paper_table(number_format, plot, as_json)
    elif not model:
        raise ParameterError("memory needs a model; write --model demo, or --table2 for the paper's table")
    else:
        _models_table(model, tokens, number_format, adapters_of(adapter), plot, as_json, weights=weights)


def _models_table(
    models: list[str],
    tokens: int | None,
    codec: NumberFormat,
    folders: Mapping[str, str],
    plot: Path | None,
    as_json: bool,
    *,
    weights: bool,
) -> None:
    from inlay.authoring.memory import known_without_files, shape_named

    for name in models:
        if not known_without_files(name):
            announce_hub(name)
    shapes = {name: shape_named(name) for name in models}
    rows = [_row(name, shape, tokens, codec) for name, shape in shapes.items()]
    if weights:
        for row in rows:
            row["weights"] = _weights(row["model"])
    adapters = [_adapter(name, folder) for name, folder in folders.items()]
    if plot is not None:
        from inlay.authoring.plot import Sizes, draw_memory

        draw_memory([Sizes(row["model"], row["mib_per_token"]) for row in rows], plot, kept=f"kept in {codec.name}")
    if as_json:
        described = {"codec": codec.name, "scales": codec.adds, "tokens": tokens, "models": rows}
        print(json.dumps(described | ({"adapters": adapters} if adapters else {})))
        return
    _print_models(rows, shapes, tokens)
    print(f"\nMiB are 2^20 bytes. {codec.name}: {codec.bits} bits an element; scales add {codec.adds}.")
    for row in rows if weights else ():
        print(f"{row['model']}: {_in_words(row['weights'])}.")
    for row in rows:
        for note in row["notes"]:
            print(f"{row['model']}: {note}.")
    for row in adapters:
        size = mib(row["bytes"] / MIB)
        print(f"adapter {row['adapter']}: {size} MiB of weights in bfloat16, twice that in float32, once for all.")


def _weights(name: str) -> dict[str, int] | None:
    """Return the bytes of a model's weights by dtype or quantization; None if only the paper's figures are known."""
    from inlay.authoring.memory import weights_named

    return weights_named(name)


def _in_words(weights: dict[str, int] | None) -> str:
    if weights is None:
        return "its weights are not counted, since only the paper's figures of it are known"
    return "weights take " + ", ".join(f"{_size(size)} in {form}" for form, size in weights.items())


def _adapter(name: str, folder: str) -> Row:
    """Return a row. ``bytes`` are for bfloat16."""
    from inlay.models.lora import size_of

    numbers = size_of(name, folder)
    return {"adapter": name, "numbers": numbers, "bytes": 2 * numbers}


def _row(name: str, shape: KVShape, tokens: int | None, codec: NumberFormat) -> Row:
    per_token = shape.bytes_per_token(codec)
    row: Row = {
        "model": name,
        "type": shape.kind,
        "kv_layers": len(shape.layers),
        "shared_layers": shape.shared,
        "recurrent_layers": shape.recurrent,
        "windows": sorted(set(shape.windows)),
        "bytes_per_token": per_token,
        "mib_per_token": per_token / MIB,
        "notes": [*shape.notes, *_window_note(shape)],
    }
    if tokens is not None:
        row |= {"bytes": tokens * per_token, "sequence_bytes": shape.sequence_bytes(tokens, codec)}
    return row


def _window_note(shape: KVShape) -> list[str]:
    if not shape.windows:
        return []
    sizes = ", ".join(f"{size:,}" for size in sorted(set(shape.windows)))
    return [
        f"{len(shape.windows)} of {len(shape.layers)} layers see the last {sizes} positions alone; a stored module may "
        "be read from anywhere, so it keeps all of its tokens there, and one running sequence only the last ones"
    ]


def _print_models(rows: list[Row], shapes: dict[str, KVShape], tokens: int | None) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console

    windowed = tokens is not None and any(row["windows"] for row in rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("a token keeps", overflow="fold")
    table.add_column("MiB/token", justify="right", no_wrap=True)
    if tokens is not None:
        table.add_column(f"{tokens:,} tokens", justify="right", no_wrap=True)
    if windowed:
        table.add_column("one sequence", justify="right", no_wrap=True)
    for row in rows:
        cells = [row["model"], kept(shapes[row["model"]]), mib(row["mib_per_token"])]
        cells += [_size(row["bytes"])] if tokens is not None else []
        cells += [_size(row["sequence_bytes"])] if windowed else []
        table.add_row(*cells)
    stdout_console().print(table, markup=False)


def kept(shape: KVShape) -> str:
    """Describe the layers of a model in words, kind by kind: '32 layers × 2 × 8 heads × 128'."""
    kinds: dict[str, int] = {}
    for layer in shape.layers:
        keys, values = layer.keys, layer.values
        if keys == values:
            what = f"2 × {counted(keys.count, 'head')} × {keys.width}"
        else:
            what = f"({keys.width} + {values.width})"
        kinds[what] = kinds.get(what, 0) + 1
    return " + ".join(f"{counted(many, 'layer')} × {what}" for what, many in kinds.items())


def mib(value: float) -> str:
    """Format with four decimals, so that small and large models align."""
    return f"{value:,.4f}"


def _size(count: int) -> str:
    return f"{count / MIB:,.1f} MiB" if count < 1024 * MIB else f"{count / MIB / 1024:,.2f} GiB"


def _paper_table(codec: NumberFormat, plot: Path | None, as_json: bool) -> None:
    """Print and draw the paper's figures, which count all heads, beside the real ones, all at 16 bits."""
    from inlay.authoring.memory import ARCHITECTURES

    rows: list[Row] = [
        {
            "model": name,
            "paper_name": one.label,
            "paper": one.paper,
            "all_heads": one.every_head().bytes_per_token(codec) / MIB,
            "kept": None if one.encoder else one.shape().bytes_per_token(codec) / MIB,
            "reason": one.reason(),
        }
        for name, one in ARCHITECTURES.items()
    ]
    if plot is not None:
        from inlay.authoring.plot import Sizes, draw_memory

        sizes = [Sizes(row["model"], row["kept"], row["all_heads"]) for row in rows]
        draw_memory(sizes, plot, kept="kept at 16 bit", other="every head counted, as the paper does")
    if as_json:
        print(json.dumps({"unit": "MiB per token, 16 bit", "table2": rows}))
        return
    _print_paper(rows)


def _print_paper(rows: list[Row]) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console

    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)
    for name in ("paper", "all heads", "kept"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why")
    for row in rows:
        really = "—" if row["kept"] is None else mib(row["kept"])
        table.add_row(row["model"], f"{row['paper']:.2f}", mib(row["all_heads"]), really, row["reason"])
    stdout_console().print(table, markup=False)
    print("\nMiB (2^20 bytes) a token at 16 bit. The paper counts every head and cuts off after two decimals.")
