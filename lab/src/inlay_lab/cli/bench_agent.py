"""``inlay bench agent``: the tokens that an agent's turns compute, and the time to the first token of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AsJson, DType, Model, Quantization, Quick, Threads
from inlay.cli.output import token_progress
from inlay_lab.cli.bench_tables import make_table, show

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = {"same": "The same tools and files in every turn", "changed": "With a new tool and a moved file"}


def agent(
    model: Model,
    turns: Annotated[int, typer.Option(help="Questions of the conversation.")] = 20,
    tools: Annotated[int, typer.Option(help="Functions that the agent may call.")] = 12,
    tokens: Annotated[int, typer.Option(help="Of the tools' definitions and the files together.")] = 6000,
    new: Annotated[int, typer.Option(help="Tokens of each question; an answer has half as many.")] = 80,
    thinking: Annotated[
        int, typer.Option(help="Tokens of reasoning in front of each answer, which later prompts leave out.")
    ] = 0,
    added_at: Annotated[int, typer.Option(help="The turn at which a tool is added.")] = 10,
    moved_at: Annotated[int, typer.Option(help="The turn at which a file moves.")] = 15,
    threads: Threads = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's server. Default: the one on PATH.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Play an agent with scripted answers, under exact and modular reuse, and on llama.cpp's server if there is one."""
    from inlay_lab.bench.agent import AgentSetting, measure_agent

    sizes = {"turns": turns, "tools": tools, "tokens": tokens, "added_at": added_at, "moved_at": moved_at, "new": new}
    if quick:
        sizes = {"turns": 4, "tools": 3, "tokens": 600, "added_at": 2, "moved_at": 3, "new": 40}
    setting = AgentSetting(
        model=model, dtype=dtype, quantization=quantization, thinking=thinking, llama_server=llama_server, **sizes
    )
    with token_progress("turns") as progress:
        result = measure_agent(setting, progress) | {"quick": quick}
    tables = ((_TITLES[name], _table(result["prompt_tokens"][name], each)) for name, each in result["runs"].items())
    notes = [f"\nllama-server: {result['without_llama']}"] if result["without_llama"] else []
    show(result, tables, as_json, notes)


def _table(lengths: list[int], columns: dict[str, Any]) -> Table:
    table = make_table(("turn", "prompt", *(heading for name in columns for heading in (f"{name}", "ms"))))
    for number, length in enumerate(lengths):
        table.add_row(f"{number + 1}", f"{length:,}", *_cells(turns[number] for turns in columns.values()))
    totals = [
        {name: sum(turn[name] for turn in turns) for name in ("computed_tokens", "ttft_s")}
        for turns in columns.values()
    ]
    table.add_row("all", f"{sum(lengths):,}", *_cells(totals))
    return table


def _cells(turns: Any) -> list[str]:
    return [cell for turn in turns for cell in (f"{turn['computed_tokens']:,}", f"{turn['ttft_s'] * 1000:,.0f}")]
