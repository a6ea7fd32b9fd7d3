"""``inlay bench content``: how much repeated text ``find="content"`` reads, beside marks and exact prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AsJson, DType, KVMemory, Model, Quantization, Quick, Threads, Weights
from inlay.cli.output import token_progress
from inlay_lab.cli.bench_tables import make_table, show

if TYPE_CHECKING:
    from rich.table import Table


def content(
    model: Model = "demo",
    workload: Annotated[
        str,
        typer.Option(
            help="rag: documents in new combinations. agent: sessions that read the same files. repeat: each text five "
            "times, for the time of each sighting."
        ),
    ] = "rag",
    prompts: Annotated[int, typer.Option(help="Prompts.")] = 1_000,
    documents: Annotated[int, typer.Option(help="Documents in the collection of rag.")] = 400,
    paragraphs: Annotated[int, typer.Option(help="Paragraphs of a document.")] = 4,
    chosen: Annotated[int, typer.Option(help="Documents of a prompt.")] = 4,
    characters: Annotated[int, typer.Option(help="The most characters of a file that an agent reads.")] = 800,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    dtype: DType = "float32",
    quantization: Quantization = None,
    weights: Weights = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Ask prompts with repeated text under exact reuse, with marks, and without marks under find="content"."""
    from inlay.settings import parse_bytes
    from inlay_lab.bench.content import ContentSetting, measure_content
    from inlay_lab.bench.content_prompts import Sizes

    given: dict[str, Any] = {"prompts": prompts, "documents": documents, "paragraphs": paragraphs, "chosen": chosen}
    if quick:
        given |= {"prompts": 40, "documents": 12}
    setting = ContentSetting(
        model=model,
        workload=workload,
        sizes=Sizes(**given, characters=characters, seed=seed),
        dtype=dtype,
        quantization=quantization,
        weights=weights,
        kv_memory=None if kv_memory is None else parse_bytes("kv_memory", kv_memory),
    )
    with token_progress("prompts") as progress:
        result = measure_content(setting, progress) | {"quick": quick}
    shares = {"of the tokens that marks read": "of_marks", "of those beyond exact prefixes": "of_marks_beyond_exact"}
    given = {words: result[name] for words, name in shares.items() if result[name] is not None}
    notes = [f"content reads {share:.0%} {words}" for words, share in given.items()]
    show(result, [(f"{prompts:,} prompts of {workload}", _table(result["rows"]))], as_json, notes)


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    sightings = len(next(iter(rows.values())).get("sightings_ms", ()))
    numbered = [f"{number + 1}." for number in range(sightings)]
    table = make_table(
        ("way", "prompt tokens", "read", "recomputed", "computed", "first token, p50, ms", "mean", *numbered)
    )
    for name, row in rows.items():
        counts = [f"{row[key]:,}" for key in ("prompt", "read", "recomputed", "computed")]
        times = [row["ttft_p50_ms"], row["ttft_mean_ms"], *row.get("sightings_ms", ())]
        table.add_row(name, *counts, *(f"{time:.1f}" for time in times))
    return table
