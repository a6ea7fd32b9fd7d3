"""``inlay eval reading``: reading comprehension over real passages, under reuse policies and in full prefill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli.loading import told_loading
from inlay.cli.options import AsJson, DType, KVMemory, Model, Quantization, Threads, Weights, words
from inlay.wording import clip


def reading(
    data: Annotated[
        Path,
        typer.Option(
            help="A folder with passages.jsonl (name, text) and questions.jsonl (passage, question, answers)."
        ),
    ],
    model: Model = "demo",
    reuse: Annotated[
        str, typer.Option(help="Reuse policies, with commas; full prefill is always measured.")
    ] = "isolated,anchored,anchored+profiled:0.15,primed,primed+profiled:0.15,primed+profiled*query:0.15",
    passages: Annotated[int, typer.Option(help="Passages of a prompt.", min=2)] = 6,
    questions: Annotated[int, typer.Option(help="The most questions.", min=1)] = 100,
    floor: Annotated[
        bool, typer.Option(help="Measure full prefill in bfloat16 as well: the noise floor. Loads the model twice.")
    ] = True,
    report: Annotated[Path | None, typer.Option(help="Write the table and the JSON into this directory.")] = None,
    kv_memory: KVMemory = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    threads: Threads = None,
    dtype: DType = "float32",
    quantization: Quantization = None,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Compare answers to questions about real passages under reuse policies with those of full prefill."""
    from inlay.cli.output import report_folder, token_progress

    with told_loading("the libraries"):
        from inlay.client.llm import LLM
        from inlay_lab.eval.reading import measure_reading, read_data, table

    found = read_data(data)
    if report is not None:
        report_folder(report)
    settings: dict[str, Any] = {"store": "off", "promotion_memory": 0, "generation_config": "off", "seed": seed}
    if kv_memory is not None:
        settings["kv_memory"] = kv_memory
    with told_loading(f"the model {clip(model)}"):
        llm = LLM(model, dtype=dtype, quantization=quantization, weights=weights, **settings)
        other = LLM(model, dtype="bfloat16", weights=weights, **settings) if floor else None
    with token_progress("questions") as progress:
        result = measure_reading(
            llm,
            found,
            policies=words(reuse),
            passages=passages,
            questions=questions,
            floor=other,
            progress=progress,
        )
    if report is not None:
        (report / "reading.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
        (report / "reading.md").write_text(table(result) + "\n", encoding="utf-8")
    print(json.dumps(result) if as_json else table(result))
