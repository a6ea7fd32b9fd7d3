"""``inlay eval``: the effect of reuse on answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import (
    AsJson,
    DType,
    KVCacheDType,
    Model,
    Quantization,
    Threads,
    Weights,
    check_plot,
    counts,
    words,
)
from inlay.cli.output import check_outputs, output_file, report_folder, stdout_console, token_progress, told_loading
from inlay.wording import clip
from inlay_lab.cli.eval_longbench import longbench
from inlay_lab.cli.eval_reading import reading
from inlay_lab.cli.eval_retrieval import retrieval

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(help="Measure answers with reuse against answers without.", no_args_is_help=True)
app.command(name="longbench")(longbench)
app.command(name="reading")(reading)
app.command(name="retrieval")(retrieval)


@app.callback()
def _eval() -> None:
    """Measure answers with reuse against answers without."""


@app.command(name="modular-qa")
def modular_qa(
    model: Model = "demo",
    reuse: Annotated[
        str,
        typer.Option(help="Reuse policies, as docs/reference/policies.md writes them: one, or several with commas."),
    ] = "off,isolated,anchored,modular",
    positions: Annotated[
        str | None,
        typer.Option(help="schema, packed, or both with a comma; packed where the model allows it, if not given."),
    ] = None,
    documents: Annotated[
        str, typer.Option(help="Documents that a prompt imports: a number, or several with commas.")
    ] = "6",
    questions: Annotated[int, typer.Option(help="Questions over all tasks, as many of each.")] = 200,
    tasks: Annotated[
        str,
        typer.Option(help="Also superlative, sort, conflict, shared: one, or several with commas; all for all."),
    ] = "single,compare,count,unstated,form",
    order: Annotated[
        str, typer.Option(help="Of documents in a prompt: schema, or permuted (with packed positions).")
    ] = "schema",
    spare: Annotated[
        int | None,
        typer.Option(help="Documents of a schema that a prompt leaves out; as many as it imports, if not given."),
    ] = None,
    scaffold: Annotated[
        bool,
        typer.Option("--scaffold", help="Also run isolated and anchored with each prompt's documents in a scaffold."),
    ] = False,
    repeat: Annotated[
        int,
        typer.Option(
            help="Also ask each question this many times under modular. Idle time in between encodes repeated "
            "combinations exactly."
        ),
    ] = 0,
    healing: Annotated[int, typer.Option(hidden=True, help="The former name of --repeat.")] = 0,
    seed: Annotated[int, typer.Option(help="Of documents and questions, and of random weights.")] = 0,
    threads: Threads = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    weights: Weights = None,
    answers: Annotated[
        Path | None, typer.Option(help="Write every answer to this file, one JSON object on each line.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write tables and drawings into this directory (needs inlay-llm\\[plots]), and keep the answers: "
            "the same command goes on where it was broken off."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite that file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Questions over imported documents: right answers and divergence from full prefill, mode by mode."""

    with told_loading("the libraries"):
        from inlay.client.llm import LLM
        from inlay_lab.eval.across import ALL_TASKS
        from inlay_lab.eval.modular_qa import measure_modular_qa
        from inlay_lab.eval.setting import Setting

    if healing:
        print(f"inlay: --healing is deprecated; write --repeat {healing}", file=sys.stderr)
        repeat = repeat or healing
    setting = Setting(
        reuse=words(reuse),
        positions=None if positions is None else words(positions),
        documents=counts("--documents", documents),
        questions=questions,
        spare=spare,
        scaffold=scaffold,
        repeat=repeat,
        seed=seed,
        tasks=ALL_TASKS if tasks == "all" else words(tasks),
        order=order,
    )
    check_outputs((answers,), force)
    if report is not None:
        report_folder(report)
        check_plot(report / "recomputed.png")
    # No promotion between questions, except for the promotion curve.
    idle: dict[str, Any] = {} if repeat else {"promotion_memory": 0}
    with told_loading(f"the model {clip(model)}"):
        llm = LLM(
            model,
            dtype=dtype,
            quantization=quantization,
            weights=weights,
            seed=seed,
            kv_cache_dtype=kv_cache_dtype,
            **idle,
        )
    if llm.loaded.note:
        print(f"inlay: {llm.loaded.note}", file=sys.stderr)
    with token_progress("answering") as progress, ExitStack() as files:
        write = None if answers is None else files.enter_context(output_file(answers))
        result = measure_modular_qa(
            llm,
            setting,
            progress,
            None if write is None else partial(_keep, write),
            None if report is None else report / "answers.jsonl",
        )
    for name, taken in result.get("auto", {}).items():
        print(f"inlay: {name} is {taken} on this model", file=sys.stderr)
    if repeat:
        from inlay_lab.eval.repeated import measure_repeated

        with token_progress("asking again") as progress:
            result["repeated"] = measure_repeated(llm, setting, progress)
    if report is not None:
        from inlay_lab.eval.report import write_report

        write_report(result, report)
    if as_json:
        print(json.dumps(result))
    else:
        _print_tables(result)


def _keep(write: Callable[[str], None], row: dict[str, Any]) -> None:
    write(json.dumps(row, ensure_ascii=False) + "\n")


def _print_tables(result: dict[str, Any]) -> None:

    console = stdout_console()
    several = len({row["documents"] for row in result["rows"]}) > 1
    for _, group in groupby(result["rows"], key=itemgetter("documents", "reuse", "positions", "scaffold")):
        rows = list(group)
        console.print(f"\n{_title(rows[-1], several)}", style="bold", highlight=False)
        console.print(_table(rows))
    if "repeated" in result:
        console.print("\nmodular, asked again and again, with idle time in between", style="bold", highlight=False)
        console.print(_repeated_table(result["repeated"]))


def _repeated_table(rows: list[dict[str, Any]]) -> Table:
    """A line for each number of documents and repetition."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("documents", "time", "exact match", "KL (nats)", "largest KL", "approximate", "promoted"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['documents']:,}",
            f"{row['repetition']:,}",
            f"{row['exact_match']:.3f}",
            f"{row['kl']:.2g}",
            f"{row['most_kl']:.2g}",
            f"{row['approximate']:.0%}",
            f"{row['promoted_tokens']:,.0f}",
        )
    return table


def _title(of_all: dict[str, Any], several: bool) -> str:
    """A mode's title and figures, from its row of all tasks.

    Args:
        of_all: The row.
        several: The result has several numbers of documents.
    """
    mode = f"{of_all['reuse']}, {of_all['positions']}{', scaffold' if of_all['scaffold'] else ''}"
    mode += f", {of_all['documents']} documents" if several else ""
    return f"{mode}: {of_all['questions']:,} questions, {of_all['cached']:.0%} of the prompts' tokens cached"


def _table(rows: list[dict[str, Any]]) -> Table:
    """One mode's tasks, and all of them together in the last row."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True)
    for name in ("exact match", "95% interval", "KL (nats)", "only off", "only this", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['exact_match']:.3f}",
            f"{row['low']:.3f}–{row['high']:.3f}",
            f"{row['kl']:.4f}",
            f"{row['only_reference']:,}",
            f"{row['only_this']:,}",
            f"{row['p_value']:.3g}",
            style="bold" if row is rows[-1] else None,
        )
    return table
