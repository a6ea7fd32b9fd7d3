"""``inlay bench``: measurements that users can repeat."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from inlay.errors import ParameterError

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure speed on this machine."""


@app.command()
def ttft(
    model: Annotated[str, typer.Option(help="A directory, a hub name, or random:<shape>.")],
    cached: Annotated[str, typer.Option(help="Cached tokens: a number, or several with commas.")] = "2048",
    new: Annotated[int, typer.Option(help="New tokens behind them.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    reuse: Annotated[str, typer.Option(help="isolated or anchored.")] = "isolated",
    positions: Annotated[str | None, typer.Option(help="schema or packed.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of each; medians are reported.")] = 7,
    baseline: Annotated[str, typer.Option(help="transformers: the stock model's full prefill; none: skip it.")] = (
        "transformers"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Time to first token with cached modules, against a full prefill and against the new tokens alone."""
    counts = _counts(cached)
    for name, value, allowed in (
        ("--reuse", reuse, ("isolated", "anchored")),
        ("--baseline", baseline, ("transformers", "none")),
    ):
        if value not in allowed:
            raise ParameterError(f"{name} is '{value}'; use one of {', '.join(allowed)}")
    from inlay.bench.ttft import Setting, measure_ttft
    from inlay.cli.progress import token_progress

    with token_progress("measuring") as progress:
        result = measure_ttft(
            model,
            [Setting(count, new) for count in counts],
            dtype=dtype,
            reuse=reuse,
            positions=positions,
            runs=runs,
            baseline=baseline == "transformers",
            progress=progress,
        )
    if not as_json:
        _table(result)
    print(json.dumps(result))


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(f"--cached is '{text}'; write a number, or several with commas: 1024,2048") from None


def _table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    names = ("cached", "new", "ttft_ms", "full_prefill_ms", "bound_ms", "speedup", "over_bound")
    for name in names:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(*("—" if row[name] is None else f"{row[name]:,}" for name in names))
    Console().print(table)
