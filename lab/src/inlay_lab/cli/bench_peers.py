"""``inlay bench peers``: inlay beside other engines, with the same prompts on the same machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AsJson, Model, Runs, Threads, counts
from inlay.cli.output import token_progress
from inlay.errors import ParameterError
from inlay_lab.cli.bench_tables import make_table, number, show

if TYPE_CHECKING:
    from rich.table import Table


def peers(
    model: Model,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Another engine and the Python that has it, such as vllm=/opt/vllm/bin/python; again for each: vllm, "
            "vllm-eager, vllm-float32, vllm-eager-float32, llama.cpp, openvino, mistral.rs."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="A checkpoint of the model, for engines that read no GGUF file.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="A GGUF file of the model, for engines that read only these.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of inlay's weights and vLLM's.")] = "bfloat16",
    cached: Annotated[
        str, typer.Option(help="Cached tokens. A prompt of the first number is also timed without a cache.")
    ] = "2048,1024,4096",
    new: Annotated[int, typer.Option(help="New tokens of a prompt.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    batch: Annotated[int, typer.Option(help="Prompts at once.")] = 16,
    runs: Runs = 3,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Time first tokens, one answer, and many answers behind a shared prefix, in inlay and in other engines."""
    from inlay_lab.bench.peers import PeersSetting, measure_peers

    setting = PeersSetting(
        model=model,
        engines={"inlay": Path(sys.executable), **dict(_parsed(each) for each in engine or ())},
        folder=folder,
        gguf=gguf,
        dtype=dtype,
        cached=tuple(counts("--cached", cached)),
        new=new,
        tokens=tokens,
        batch=batch,
        runs=runs,
    )
    with token_progress("rounds") as progress:
        result = measure_peers(setting, progress, lambda sentence: print(f"inlay: {sentence}", file=sys.stderr))
    skipped = {name: column["skipped"] for name, column in result["columns"].items() if "skipped" in column}
    notes = [f"{name} is left out: {reason}" for name, reason in skipped.items()]
    show(result, [(f"{model}, {dtype}", _table(result["columns"], new, batch))], as_json, notes)
    if skipped:
        raise typer.Exit(1)


def _parsed(text: str) -> tuple[str, Path]:
    name, equals, python = text.partition("=")
    if not equals:
        raise ParameterError(f"--engine is '{text}'; write the engine and the Python that has it: vllm=PATH")
    return name, Path(python)


def _table(columns: dict[str, dict[str, Any]], new: int, batch: int) -> Table:
    timed = {name: column for name, column in columns.items() if "skipped" not in column}
    table = make_table(("", *(f"{name} {column['version']}" for name, column in timed.items())))
    for row in next(iter(timed.values()), {}):
        if row != "version":
            table.add_row(_title(row, new, batch), *(number(column[row]) for column in timed.values()))
    return table


def _title(row: str, new: int, batch: int) -> str:
    kind, *count = row.split("_")
    return {
        "load": "ready after, s",
        "cold": f"first token, {count[0]} + {new} tokens computed, ms",
        "behind": f"first token behind {count[0]} cached, ms",
        "decode": f"one answer behind {count[0]}, ms/token",
        "batch": f"{batch} answers at once behind {count[0]} shared, tokens/s",
        "peak": "peak memory, GiB",
    }[kind]
