"""``inlay batch``: answer a file of requests in OpenAI's Batch format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.options import announce_hub
from inlay.cli.output import told_loading
from inlay.cli.settings import Options, with_settings
from inlay.config import EngineConfig
from inlay.errors import ParameterError
from inlay.pml import Schema
from inlay.settings import BATCH, settings_of
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.batch import BatchCounts
    from inlay.batch.requests import Progress
    from inlay.client.async_llm import AsyncLLM


@with_settings(BATCH)
def batch(
    input: Annotated[Path, typer.Argument(metavar="INPUT", help="The requests, one a line, in OpenAI's Batch format.")],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="The answers, one a line, as they come; taken up where it ends.")
    ],
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Answer the requests of OUTPUT that failed again.")
    ] = False,
    *,
    options: Options,
) -> int:
    """Answer a file of requests. Requests that share text run together, so every text is computed once.

    For a wrong line, the output has a line with the reason.

    After a kill or Ctrl-C, run the same command again: it answers the missing requests. OUTPUT.state names the batch.

    The last line on stdout is a JSON object of counts. Exit status 1 if lines were wrong or requests failed.
    """
    options.check()
    model = announce_hub(options["model"])
    schemas = _schemas(options["schema"] or [])
    with told_loading("the libraries"):
        from inlay.batch import BatchCounts, BatchJob, run_batch
        from inlay.models.location import served_names

    names = served_names(model, options["served_model_name"])
    settings = options.llm_settings(model, *names)
    adapters, policy = settings["adapters"], options.policy

    job = BatchJob(
        input=input,
        output=output,
        names=tuple(dict.fromkeys((*names, model))),  # requests may use the command's MODEL as name
        retry_failed=retry_failed,
        schemas=schemas,
        reuse=None if policy is None else str(policy),
        seed=settings["seed"],
        default_max_tokens=options["default_max_tokens"],
        tool_parser=options["tool_parser"],
        reasoning_parser=options["reasoning_parser"],
        generation_config=settings["generation_config"],
        chat_template=settings["chat_template"],
        max_model_len=settings["max_model_len"],
        loading={name: settings[name] for name in ("dtype", "quantization")}
        | {"model": model, "weights": settings["weights"] or "packed"}
        | ({"adapters": adapters} if adapters else {})
        | {
            name: settings[name]
            for name in ("kv_cache_dtype", "tolerance", "template_date")
            if settings[name] != settings_of(EngineConfig)[name].default
        },
    )

    def load() -> AsyncLLM:
        from inlay.client.async_llm import AsyncLLM

        with told_loading(f"the model {clip(model)}"):
            # without promotion, so that a line's answer depends on nothing that there was time for
            llm = AsyncLLM(model, **settings, promotion_memory=0)
        if llm.loaded.note:
            print(f"inlay: {llm.loaded.note}", file=sys.stderr)
        return llm

    counts = BatchCounts()
    try:
        with _bar(counts) as progress:
            run_batch(job, load, progress, counts)
    except KeyboardInterrupt:
        print("inlay: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if counts.failed:
        print(
            f"inlay: {counts.failed:,} of {counts.requests:,} requests failed; {output} says why, line by line; "
            "--retry-failed answers them again",
            file=sys.stderr,
        )
    print(json.dumps({**counts.describe(), "model": model, "output": str(output)}, ensure_ascii=False))
    return 1 if counts.failed else 0


def _schemas(files: Sequence[Path]) -> list[Schema]:
    """Read schemas with distinct names. Raises PMLError and ParameterError."""
    from inlay.cli.pml_files import schema_file

    found: dict[str, Path] = {}
    schemas = []
    for file in files:
        schema = schema_file(file)
        if schema.name in found:
            raise ParameterError(f"{file}: its schema is named '{schema.name}' as is that of {found[schema.name]}")
        found[schema.name] = file
        schemas.append(schema)
    return schemas


@contextmanager
def _bar(counts: BatchCounts) -> Iterator[Progress]:
    """Show progress, speed, cached share and remaining time in a bar on stderr. Shown on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from inlay.batch.requests import Stage

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[said]}"))
    console = Console(stderr=True)
    shown = console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown) as bar:
        tasks = {stage: bar.add_task(stage, total=None, visible=False, said="") for stage in Stage}

        def report(stage: Stage, done: int, total: int) -> None:
            said = _said(counts, done, total) if stage is Stage.ANSWERING else ""
            for other, task in tasks.items():
                bar.update(task, visible=other is stage)
            bar.update(tasks[stage], completed=done, total=total, said=said)

        yield report


def _said(counts: BatchCounts, done: int, total: int) -> str:
    failed = f", {counts.failed:,} failed" if counts.failed else ""
    speed = f"{counts.tokens_per_s:,.0f} tokens/s"
    return f"{done:,}/{total:,} requests{failed}, {speed}, {counts.cached_share:.0%} cached,"
