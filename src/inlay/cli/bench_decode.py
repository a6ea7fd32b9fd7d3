"""``inlay bench decode``: milliseconds a token of one answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.bench_options import AsJson, Quick, Runs, make_table, number, show, words

if TYPE_CHECKING:
    from rich.table import Table


def decode(
    model: Annotated[str, typer.Option(help="A directory, a hub name, random:<shape>, or demo.")],
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of the answer that are timed, behind its first.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    baselines: Annotated[str, typer.Option(help="Of transformers, llama.cpp; none for inlay alone.")] = (
        "transformers,llama.cpp"
    ),
    runs: Runs = 5,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """One answer, token by token: inlay, stock transformers and llama.cpp; and what a step of ours is made of."""
    from inlay.bench.decode.measure import DecodeSetting, measure_decode
    from inlay.cli.progress import token_progress

    setting = DecodeSetting(
        model=model,
        context=context,
        tokens=min(tokens, 8) if quick else tokens,
        dtype=dtype,
        baselines=() if baselines == "none" else words(baselines),
        runs=1 if quick else runs,
        quick=quick,
    )
    with token_progress("decoding") as progress:
        result = measure_decode(setting, progress)
    show(result, _tables(result), as_json)


def _tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    title = f"{result['model']}, {result['dtype']}: {result['tokens']} tokens behind a prompt of {result['context']}"
    table = make_table(("who", "ms/token", "tokens/s", "weights read, GB/s", "of copying"))
    for name, cell in result["columns"].items():
        if "skipped" in cell:
            table.add_row(name, "—", "—", "—", cell["skipped"])
            continue
        rates = (number(cell["ms_per_token"]), number(cell["tokens_s"]), number(cell["gb_s"]))
        table.add_row(name, *rates, f"{cell['of_copy']:.0%}")
    yield title, table
    step = result["step"]
    parts = make_table(("part", "ms", "share"))
    for name, ms in step["ms"].items():
        parts.add_row(name, number(ms), f"{step['share'][name]:.0%}")
    yield f"a step of ours ({step['how']}: {step['ms_per_token']:.2f} ms)", parts
