"""``inlay schema from-prompts``: derives a schema from a log of prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import Tokenizer
from inlay.cli.output import check_outputs, output_file, stdout_console
from inlay.errors import ParameterError
from inlay.wording import counted, listed

if TYPE_CHECKING:
    from rich.table import Table

    from inlay.authoring.extract import Proposal
    from inlay.authoring.extract.extraction import Stage
    from inlay.authoring.extract.find import Encode

Row = dict[str, Any]

_ROWS = 30  # modules in the table
_COUNTS = 40  # characters of its number columns


def from_prompts(
    file: Annotated[str, typer.Argument(help="A log as JSON lines, plain or gzip, or - for standard input.")],
    output: Annotated[Path | None, typer.Option(help="Write the schema (PML) to this file.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Write the log's prompts as prompts of the schema to this file, as JSON lines.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    name: Annotated[str | None, typer.Option(help="The schema's name; that of the file, if not given.")] = None,
    model: Tokenizer = "demo",
    min_prompts: Annotated[int, typer.Option(help="In how many different prompts a text must stand.")] = 3,
    min_tokens: Annotated[int, typer.Option(help="How long a text must be.")] = 32,
    max_modules: Annotated[int, typer.Option(help="Keep this many modules: those that save most.")] = 100,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip and count lines that are no requests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")] = False,
) -> None:
    """Find repeated text in a log of prompts, propose a schema, and count the tokens that it would have saved.

    A line of the log is {"prompt": …}, {"messages": […]}, an OpenAI Batch request, or a string.
    """
    from inlay.authoring.extract import Corpus, ExtractionSettings, LogError, LogReader, extract
    from inlay.authoring.extract.extraction import describe

    settings = ExtractionSettings(min_prompts=min_prompts, min_tokens=min_tokens, max_modules=max_modules)
    named = _name(file, name)
    check_outputs((output, prompts), force)
    with _stages() as stage:
        reader = LogReader(file, skip_bad=skip_bad, progress=stage("reading"))
        reader.check()
        encode = encoder_of(model)
        corpus = Corpus.of(reader, reader.source)
        if not len(corpus):
            raise LogError(f"{reader.source}: holds no prompts; write one request a line", code="prompt.empty_log")
        result = extract(corpus, encode, name=named, settings=settings, stage=stage)
    written = _write(result.proposal, output, prompts)
    report = {**describe(result), "model": model, "skipped_lines": reader.skipped, "written": written}
    if reader.first_skipped:
        report["notes"].append(f"{reader.skipped:,} bad lines were skipped; the first is {reader.first_skipped}")
    if reader.tool_turns:
        turns = counted(reader.tool_turns, "turn")
        report["notes"].append(f"{turns} of tools count as the user's: PML has system, user and assistant alone")
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)


def _name(file: str, name: str | None) -> str:
    from inlay.authoring.extract.proposal import schema_name
    from inlay.authoring.extract.runs import carried_by_xml

    if name is None:
        return schema_name("prompts" if file == "-" else Path(file).name.partition(".")[0])
    if not name.strip() or not carried_by_xml(name):
        raise ParameterError("--name is empty or holds control characters; write a name that people can read")
    return name


@contextmanager
def _stages() -> Iterator[Stage]:
    """Show a bar on stderr for each stage of the work. Shown on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def stage(name: str) -> Any:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield stage


def encoder_of(model: str) -> Encode:
    """Return a function that encodes many texts on all cores, since tokenizers release the GIL."""
    from inlay.models.load import load_tokenizer
    from inlay.prompt.tokens import TextEncoder

    encoder = TextEncoder(load_tokenizer(model))
    pool = ThreadPoolExecutor(os.cpu_count())
    return lambda texts: list(pool.map(encoder.text, texts))


def _write(proposal: Proposal, output: Path | None, prompts: Path | None) -> Row:
    """Write the requested files; returns option → file."""
    if not proposal.schema.children and (output or prompts):
        raise ParameterError(
            "no text repeats often and long enough for a schema, so no file is written; lower --min-tokens or "
            "--min-prompts"
        )
    written: Row = {}
    if output is not None:
        with output_file(output) as write:
            write(proposal.schema.to_pml())
        written["output"] = str(output)
    if prompts is not None:
        with output_file(prompts) as write:
            for row in _prompt_rows(proposal):
                write(json.dumps(row, ensure_ascii=False) + "\n")
        written["prompts"] = str(prompts)
    return written


def _prompt_rows(proposal: Proposal) -> Iterator[Row]:
    """Yield each prompt of the log with its line, as PML, or null with the reason."""
    for number, line in enumerate(proposal.corpus.lines.tolist()):
        prompt = proposal.prompt(number)
        if prompt is None:
            yield {"line": line, "prompt": None, "why": "it lacks the text that is always present in the schema"}
            continue
        try:
            yield {"line": line, "prompt": prompt.to_pml()}
        except ParameterError as error:
            yield {"line": line, "prompt": None, "why": str(error)}


def _print(report: Row) -> None:

    console = stdout_console()
    print(f"{report['prompts']:,} prompts, {report['tokens']:,} tokens (tokenizer of {report['model']})\n")
    if report["modules"] or report["always_present"]["tokens"]:
        console.print(_modules(report, console.width))
        if (more := len(report["modules"]) - _ROWS) > 0:
            print(f"… and {more:,} more modules; --json lists them")
        print()
    console.print(_totals(report))
    for union in report["unions"]:
        print(f"\nunion of {len(union):,}: {listed(union)}", end="")
    for note in report["notes"]:
        print(f"\nnote: {note}", end="")
    print()
    for what, path in report["written"].items():
        print(f"{'schema' if what == 'output' else 'prompts'} written to {path}")


def _modules(report: Row, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    always = report["always_present"]
    rows = [{**always, "name": "(always present)", "prompts": report["prompts_that_fit"], "text": ""}]
    rows = [*(rows if always["tokens"] else []), *report["modules"][:_ROWS]]
    room = max(width - max(len(row["name"]) for row in rows) - _COUNTS, 12)  # for the first words
    table = Table(box=None, pad_edge=False)
    table.add_column("module", no_wrap=True)
    for name in ("tokens", "prompts", "saved", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first words", no_wrap=True)
    for row in rows:
        counts = (f"{row[key]:,}" for key in ("tokens", "prompts", "saved_tokens"))
        table.add_row(Text(row["name"]), *counts, f"{row['share_of_saving']:.1%}", Text(row["text"][:room].rstrip()))
    return table


def _totals(report: Row) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("tokens of all prompts", f"{report['tokens']:,}", "")
    for label, key in (
        ("saved by this schema", "saved_by_schema"),
        ("saved by a prefix cache", "saved_by_prefix_cache"),
    ):
        table.add_row(label, f"{report[key]:,}", f"{report[key + '_share']:.1%}")
    for label, key in (
        ("prompts that fit the schema", "prompts_that_fit"),
        ("prompts with modules", "prompts_with_modules"),
        ("prompts in another order", "prompts_out_of_order"),
    ):
        table.add_row(label, f"{report[key]:,}", f"{report[key] / report['prompts']:.1%}")
    return table
