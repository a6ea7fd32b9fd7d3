"""``inlay eval reading``: reading comprehension over real passages, under reuse policies and in full prefill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli.options import AsJson, DType, KVMemory, Model, Quantization, Threads, Weights, words
from inlay.cli.output import report_folder, token_progress, told_loading
from inlay.errors import ParameterError
from inlay.wording import clip
from inlay_lab.reports import write_texts


def reading(
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with passages.jsonl (name, text) and questions.jsonl (passage, question, answers), or a "
            "JSON file of LMCache's rag-qa-quality (question, answers, ctxs)."
        ),
    ] = None,
    ruler: Annotated[
        str | None,
        typer.Option(help="Generated data in the manner of RULER: needle, multikey, variables or words."),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(help="Generated documents of this many paragraphs. The bundled model can answer from them."),
    ] = None,
    model: Model = "demo",
    reuse: Annotated[
        str, typer.Option(help="Reuse policies, with commas; full prefill is always measured.")
    ] = "isolated,anchored,anchored+profiled:0.15,primed,primed+profiled:0.15,primed+profiled*query:0.15",
    passages: Annotated[
        int, typer.Option(help="Passages of a prompt, for questions without passages of their own.", min=2)
    ] = 6,
    questions: Annotated[int, typer.Option(help="The most questions.", min=1)] = 100,
    tasks: Annotated[
        str, typer.Option(help="Tasks beside extracting answers, with commas: choice, citation, summary.")
    ] = "",
    floor: Annotated[
        bool,
        typer.Option(
            help="Measure full prefill in another rounding, too: the noise floor. It is bfloat16 for a float32 model, "
            "else float32. Loads the model twice."
        ),
    ] = True,
    marks: Annotated[
        bool,
        typer.Option(help="Mark the passages. --no-marks is for policies like modular+content, which find plain text."),
    ] = True,
    schema: Annotated[
        int,
        typer.Option(
            help="Read the passages as modules of a schema with this many passages, at its positions. 0 for marked "
            "messages, where no position is left out.",
            min=0,
        ),
    ] = 0,
    report: Annotated[
        Path | None,
        typer.Option(help="Write the table and the JSON into this directory, anew after every eight questions."),
    ] = None,
    kv_memory: KVMemory = None,
    seed: Annotated[int, typer.Option(help="Of random weights, and of generated data.")] = 0,
    threads: Threads = None,
    dtype: DType = "float32",
    quantization: Quantization = None,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Compare answers to questions about real passages under reuse policies with those of full prefill."""

    with told_loading("the libraries"):
        from inlay.client.llm import LLM
        from inlay.models.spec import dtype_name
        from inlay_lab.eval.reading import measure_reading, table
        from inlay_lab.eval.reading_data import documents_data, read_data
        from inlay_lab.eval.ruler import ruler_data

    if sum(given is not None for given in (data, ruler, documents)) != 1:
        raise ParameterError("give --data, --ruler or --documents, one of them", code="parameter.conflict")
    if ruler is not None:
        found = ruler_data(ruler, questions=questions, passages=passages, seed=seed)
    elif documents is not None:
        found = documents_data(questions=questions, passages=passages, paragraphs=documents, seed=seed)
    else:
        assert data is not None, "one is given"
        found = read_data(data)
    if report is not None:
        report_folder(report)
    settings: dict[str, Any] = {"store": "off", "promotion_memory": 0, "generation_config": "off", "seed": seed}
    if kv_memory is not None:
        settings["kv_memory"] = kv_memory
    with told_loading(f"the model {clip(model)}"):
        llm = LLM(model, dtype=dtype, quantization=quantization, weights=weights, **settings)
        rounding = "bfloat16" if dtype_name(llm.loaded.model.dtype) == "float32" else "float32"
        other = LLM(model, dtype=rounding, weights=weights, **settings) if floor else None

    def write(result: dict[str, Any]) -> None:
        if report is not None:
            write_texts(report, {"reading.json": json.dumps(result), "reading.md": table(result)})

    with token_progress("questions") as progress:
        result = measure_reading(
            llm,
            found,
            policies=words(reuse),
            passages=passages,
            questions=questions,
            tasks=words(tasks) if tasks else (),
            floor=other,
            marks=marks,
            schema=schema,
            progress=progress,
            partial=write,
        )
    print(json.dumps(result) if as_json else table(result))
