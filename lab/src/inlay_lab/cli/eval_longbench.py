"""``inlay eval longbench``: the benchmark's scores with full prefill and with reuse, in the form of the paper's
table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli.options import AsJson, DType, KVCacheDType, KVMemory, Model, Quantization, Threads, Weights, words
from inlay.cli.output import report_folder, token_progress, told_loading
from inlay.wording import clip


def longbench(
    data: Annotated[
        Path,
        typer.Option(help="The folder of the benchmark's files, such as qasper.jsonl (docs/internals/methods.md)."),
    ],
    model: Model = "demo",
    datasets: Annotated[
        str | None, typer.Option(help="Of the 21: one, or several with commas; all that are there, if not given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Rows of each dataset, the first ones; all, if not given.")] = None,
    reuse: Annotated[
        str,
        typer.Option(
            help="Reuse policies, as docs/reference/policies.md writes them, with commas; off is always asked."
        ),
    ] = "off,isolated,anchored,modular",
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt; longer ones are cut in the middle. What leaves room for an answer, if not given."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write tables into this directory, and keep the answers: the same command goes on where it was broken "
            "off."
        ),
    ] = None,
    kv_memory: KVMemory = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    threads: Threads = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    weights: Weights = "packed",
    as_json: AsJson = False,
) -> None:
    """LongBench: scores with full prefill and with documents as modules, compared question by question."""

    with told_loading("the libraries"):
        from inlay.client.llm import LLM
        from inlay_lab.eval.longbench.data import open_suite
        from inlay_lab.eval.longbench.measure import Setting, measure_longbench
        from inlay_lab.eval.longbench.metrics import check_packages

    setting = Setting(reuse=words(reuse), limit=limit, longest=max_length)
    suite = open_suite(data, None if datasets is None else words(datasets))
    check_packages(suite.datasets)
    if report is not None:
        report_folder(report)
    settings = {} if kv_memory is None else {"kv_memory": kv_memory}
    with told_loading(f"the model {clip(model)}"):
        llm = LLM(
            model,
            dtype=dtype,
            quantization=quantization,
            weights=weights,
            seed=seed,
            kv_cache_dtype=kv_cache_dtype,
            **settings,
        )
    if llm.loaded.note:
        print(f"inlay: {llm.loaded.note}", file=sys.stderr)
    with token_progress("answering") as progress:
        result = measure_longbench(llm, suite, setting, progress, None if report is None else report / "answers.jsonl")
    for name, taken in result.get("auto", {}).items():
        print(f"inlay: {name} is {taken} on this model", file=sys.stderr)
    if report is not None:
        from inlay_lab.eval.longbench.report import write_report

        write_report(result, report)
    if not as_json:
        _print_tables(result)
    print(json.dumps(result))


def _print_tables(result: dict[str, Any]) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console
    from inlay_lab.eval.longbench.report import notes, scores, title

    console = stdout_console()
    for note in notes(result):
        console.print(note, highlight=False)
    names, lines = scores(result)
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number < 2)
    for line in lines:
        table.add_row(*(cell.replace("**", "") for cell in line), style="bold" if line is lines[-1] else None)
    console.print(table)
    tests = Table(box=None, pad_edge=False)
    for number, name in enumerate(("Dataset", "Reuse", "Difference", "95% interval", "p")):
        tests.add_column(name, justify="left" if number < 2 else "right", no_wrap=number != 1)
    for row in result["rows"]:
        if row["reuse"] != "off":
            interval = f"{row['difference_low']:+.2f} to {row['difference_high']:+.2f}"
            name = title(row["dataset"])
            tests.add_row(name, row["reuse"], f"{row['difference']:+.2f}", interval, f"{row['p_value']:.3g}")
    if tests.row_count:
        console.print()
        console.print(tests)
