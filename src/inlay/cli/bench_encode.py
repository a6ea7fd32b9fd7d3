"""``inlay bench encode``: tokens a second of encoding modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.bench_options import AsJson, Quick, Runs, counts, make_table, number, show

if TYPE_CHECKING:
    from rich.table import Table


def encode(
    model: Annotated[str, typer.Option(help="A directory, a hub name, random:<shape>, or demo.")],
    modules: Annotated[int, typer.Option(help="Modules of the schema.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    batches: Annotated[str, typer.Option(help="The stock model's batch sizes; the best one counts.")] = "1,2,4,8,16",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    runs: Runs = 3,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Modules encoded packed, beside the stock model on the same texts as a batch of prompts."""
    sizes = counts("--batches", batches)
    from inlay.bench.encode import EncodeSetting, measure_encode
    from inlay.cli.progress import token_progress

    setting = EncodeSetting(
        model=model,
        modules=min(modules, 4) if quick else modules,
        tokens=min(tokens, 32) if quick else tokens,
        batches=sizes,
        dtype=dtype,
        runs=1 if quick else runs,
        quick=quick,
    )
    with token_progress("encoding") as progress:
        result = measure_encode(setting, progress)
    show(result, _tables(result), as_json)


def _tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    title = f"{result['model']}, {result['dtype']}: {result['modules']} modules, {result['tokens']:,} tokens together"
    table = make_table(("who", "tokens/s"))
    table.add_row("inlay", number(result["tokens_s"]))
    table.add_row(f"stock, batches of {result['stock_batch']}", number(result["stock_tokens_s"]))
    table.add_row("ratio", number(result["ratio"]))
    yield title, table
    tried = make_table(("batch", "tokens/s"))
    for batch, rate in result["stock_tokens_s_by_batch"].items():
        tried.add_row(batch, number(rate))
    yield "the stock model on some of them, by batch size", tried
