"""``inlay reproduce``: the published experiments, run again, with the published figure beside ours."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.options import AsJson, Threads, announce_hub, check_plot, words
from inlay.errors import ParameterError

if TYPE_CHECKING:
    from inlay_lab.reproduce.record import Record
    from inlay_lab.reproduce.run import Entry, News, Plan


def reproduce(
    out: Annotated[
        Path, typer.Option(help="The folder of the report; what is measured is kept in it and not measured again.")
    ] = Path("reproduction"),
    quick: Annotated[bool, typer.Option("--quick", help="Sizes of minutes.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The published sizes, overnight.")] = False,
    only: Annotated[
        str | None,
        typer.Option(help="Names of experiments with commas; the others stand in the report as they are kept."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Say which experiments there are and what is kept.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is kept.")] = False,
    longbench: Annotated[
        Path | None, typer.Option(help="The folder of LongBench's files, for quality (docs/internals/methods.md).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model that answers them: a directory, a GGUF file or a hub name.")
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option(
            help="A folder of stored runs of lab/benchmarks/gpu. Default: lab/benchmarks/results, if it exists."
        ),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> int | None:
    """Run the experiments of Prompt Cache and ChunkAttention again, and write one report."""
    if quick and full:
        raise ParameterError("--quick and --full are two scales; give one of them")
    given = {"longbench": _folder("--longbench", longbench), "model": model}
    if (longbench is None) != (model is None):
        raise ParameterError(
            "--longbench and --model go together: the files, and the model that answers them; give both"
        )
    if model is not None:
        announce_hub(model)
    given["stored"] = _folder("--stored", stored) or _folder_there(Path("lab/benchmarks/results"))
    from inlay_lab.bench.machine import describe_machine
    from inlay_lab.reproduce.experiment import Scale
    from inlay_lab.reproduce.record import Record
    from inlay_lab.reproduce.report import failed, write_report
    from inlay_lab.reproduce.run import Plan, run_experiments, summary

    scale = Scale.QUICK if quick else Scale.FULL if full else Scale.DEFAULT
    plan = Plan(scale=scale, only=None if only is None else words(only), given=given, again=again)
    machine = describe_machine()
    record = Record(out / "results", scale, machine, make=not show_list)
    if show_list:
        _list(plan, record)
        return None
    check_plot(out / "images.png")
    entries: list[Entry] = []
    try:
        run_experiments(plan, record, _Teller(), entries)
    finally:  # an interrupted run reports its results too
        write_report(entries, scale, machine, out)
    if as_json:
        print(json.dumps(summary(entries, scale, machine), ensure_ascii=False))
    else:
        _print_overview([entry for entry in entries if plan.asks(entry.experiment)])
        print(f"\n{out / 'report.md'}")
    return 1 if failed(entries) else None


def _folder(option: str, path: Path | None) -> str | None:
    if path is not None and not path.is_dir():
        raise ParameterError(f"{option}: there is no folder {path}; give one that is there")
    return None if path is None else str(path.resolve())


def _folder_there(path: Path) -> str | None:
    return str(path.resolve()) if path.is_dir() else None


class _Teller:
    """Prints a line on stderr as each experiment begins and ends, with or without a terminal."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, news: News) -> None:
        at = f"[{news.number}/{news.total}] {news.experiment.name}"
        entry = news.entry
        if entry is None:
            line = f"{at}: {news.experiment.title} …"
        elif entry.kept is None:
            line = f"{at}: {entry.status}: {entry.reason}"
        else:
            passed = time.monotonic() - self._began
            line = f"{at}: {entry.status}, {entry.kept.took_s:,.1f} s; {passed / 60:.1f} minutes in all"
        print(line, file=sys.stderr, flush=True)


def _list(plan: Plan, record: Record) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console
    from inlay_lab.reproduce.catalog import EXPERIMENTS

    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(("experiment", "what", "source", plan.scale)):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for each in EXPERIMENTS.values():
        kept = record.find(each, plan.settings(each))
        state = "" if kept is None else f"kept, {kept.on}, {kept.took_s:,.0f} s"
        table.add_row(each.name, each.title, each.source, state)
    stdout_console().print(table, markup=False)


def _print_overview(entries: list[Entry]) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console
    from inlay_lab.reproduce.report import overview

    header, lines = overview(entries)
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for line in lines:
        table.add_row(*line)
    stdout_console().print(table, markup=False)
