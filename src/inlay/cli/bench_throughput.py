"""``inlay bench throughput``: many requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.bench_options import AsJson, Quick, counts, make_table, number, show, words
from inlay.errors import ParameterError

if TYPE_CHECKING:
    from rich.table import Table

#: Times in milliseconds: of a request by its tokens, to the first token, between two of them; KV in MiB.
_HEADINGS = ("who", "tok/s", "ms/tok", "first p50", "p99", "next p50", "p99", "KV", "batch", "floor", "×")


def throughput(
    model: Annotated[list[str], typer.Option(help="random:<shape>, a directory, a hub name, or demo; repeatable.")],
    part: Annotated[str, typer.Option(help="Of prefix, modules: one, or both with a comma.")] = "prefix,modules",
    against: Annotated[str, typer.Option(help="Of off, stock, transformers; none for inlay alone.")] = (
        "off,stock,transformers"
    ),
    arrivals: Annotated[str, typer.Option(help="Of batch (all at once), poisson.")] = "batch",
    rates: Annotated[str | None, typer.Option(help="Requests a second of Poisson arrivals; 0.25,0.5,1,2.")] = None,
    requests: Annotated[int | None, typer.Option(help="How many in a run; 16.")] = None,
    batch: Annotated[int | None, typer.Option(help="The most that run at once; 16.")] = None,
    prefixes: Annotated[str | None, typer.Option(help="Tokens that all prompts share; 0,512,1024,2048.")] = None,
    question: Annotated[int | None, typer.Option(help="Tokens of each prompt's own; 32.")] = None,
    completion: Annotated[int | None, typer.Option(help="Tokens of an answer behind a prefix; 64.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    runs: Annotated[int, typer.Option(help="Runs of each; the one of median time is reported.")] = 1,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Many requests at once: behind a shared prefix, and over modules in any order."""
    sizes: dict[str, Any] = {"requests": requests, "batch": batch, "question": question, "completion": completion}
    sizes["prefixes"] = None if prefixes is None else counts("--prefixes", prefixes)
    sizes["rates"] = None if rates is None else _rates(rates)
    if rates is not None and "poisson" not in words(arrivals):
        raise ParameterError("--rates are those of Poisson arrivals; add --arrivals poisson, or drop --rates")
    from inlay.bench.throughput.measure import ThroughputSetting, measure_throughput
    from inlay.cli.progress import token_progress

    base = ThroughputSetting(
        models=tuple(dict.fromkeys(model)),
        parts=words(part),
        columns=() if against == "none" else words(against),
        arrivals=words(arrivals),
        dtype=dtype,
        runs=runs,
    )
    setting = base.small() if quick else base
    setting = replace(setting, **{name: value for name, value in sizes.items() if value is not None})
    with token_progress("serving") as progress:
        result = measure_throughput(setting, progress)
    show(result, _tables(result), as_json)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"--rates is '{text}'; write a number, or several with commas: 0.5,1,2") from None


def _tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    skipped = make_table(("who", "because"))
    for row in result["rows"]:
        table = make_table(_HEADINGS)
        for name, cell in row["columns"].items():
            if "skipped" in cell:
                table.add_row(name, *["—"] * (len(_HEADINGS) - 1))
                skipped.add_row(name, cell["skipped"])
            else:
                table.add_row(name, *_cells(cell), _ratio(row, name))
        yield _title(row), table
    if skipped.row_count:
        yield "left out", skipped


def _title(row: dict[str, Any]) -> str:
    about = "6 of 12 modules in any order" if row["prefix"] is None else f"{row['prefix']:,} shared tokens"
    when = "all at once" if row["rate"] is None else f"{row['rate']:g} a second"
    saved = "" if row["kv_saved"] is None else f"; KV {-row['kv_saved']:+.0%} against off"
    return f"{row['model']}, {row['dtype']}: {about}; {row['requests']} requests, {when}{saved}"


def _cells(cell: dict[str, Any]) -> Iterator[str]:
    yield number(cell["tokens_s"])
    yield number(cell["latency_ms_per_token"])
    for name in ("ttft_ms", "inter_token_ms"):
        for percentile in ("p50", "p99"):
            yield number(None if cell[name] is None else cell[name][percentile])
    yield number(None if cell["kv_peak_bytes"] is None else cell["kv_peak_bytes"] / 2**20)
    yield number(cell["peak_batch"])
    yield "—" if cell["steps"] is None else f"{cell['steps']['of_floor']:.0%}"


def _ratio(row: dict[str, Any], name: str) -> str:
    ratio = (row["ratio"] or {}).get(name)
    return "—" if ratio is None else f"{ratio:.2f}"
