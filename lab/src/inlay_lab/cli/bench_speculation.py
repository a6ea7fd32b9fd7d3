"""``inlay bench speculation``: tokens a second with lookup speculation and without."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inlay.cli.options import AsJson, DType, Model, Quantization, Quick, Runs, Threads, Weights, counts, words
from inlay.cli.output import token_progress, told_loading
from inlay_lab.cli.bench_tables import make_table, number, show

_NAMES = ("off_tokens_s", "lookup_tokens_s", "ratio", "accepted_share", "equal_answers", "answers")


def speculation(
    model: Model = "demo",
    tasks: Annotated[str, typer.Option(help="Of quotes, code, agent and story, with commas.")] = (
        "quotes,code,agent,story"
    ),
    batch: Annotated[str, typer.Option(help="Answers at the same time: a number, or several with commas.")] = "1,16",
    prompts: Annotated[int, typer.Option(help="Prompts of each task, by answer at the same time.")] = 3,
    tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 128,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with passages.jsonl and questions.jsonl, for quotes; generated, if not given."),
    ] = None,
    threads: Threads = None,
    dtype: DType = "auto",
    weights: Weights = "packed",
    quantization: Quantization = None,
    runs: Runs = 3,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Tokens a second with drafts looked up in texts, and without, on answers that copy and answers that do not."""
    batches = counts("--batch", batch)
    with told_loading("the libraries"):
        from inlay_lab.bench.speculation import SpeculationSetting, measure_speculation

    setting = SpeculationSetting(
        model=model,
        tasks=words(tasks),
        batches=tuple(min(each, 4) if quick else each for each in batches),
        prompts=min(prompts, 2) if quick else prompts,
        tokens=min(tokens, 24) if quick else tokens,
        data=data,
        dtype=dtype,
        weights=weights,
        quantization=quantization,
        runs=1 if quick else runs,
        quick=quick,
    )
    with token_progress("turns") as progress:
        result = measure_speculation(setting, progress)
    table = make_table(("task", "batch", *_NAMES))
    for row in result["rows"]:
        table.add_row(row["task"], number(row["batch"]), *(number(row[name]) for name in _NAMES))
    machine = result["machine"]
    title = f"{result['model']}, {result['dtype']}, {machine['threads']} threads of {machine['cpu']}"
    show(result, [(title, table)], as_json)
