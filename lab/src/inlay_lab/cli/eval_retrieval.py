"""``inlay eval retrieval``: retrieval that prefers stored documents, against epsilon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.options import AsJson, DType, Model, Threads, Weights, check_plot
from inlay.cli.output import token_progress, told_loading
from inlay.errors import ParameterError
from inlay.wording import clip
from inlay_lab.options import floats

if TYPE_CHECKING:
    from inlay.client.llm import LLM


def retrieval(
    model: Model = "demo",
    documents: Annotated[
        int | None, typer.Option(help="Generated documents, 2,000 by default. Not with --data.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with passages.jsonl (name, text) and questions.jsonl (passage, question, answers), in "
            "place of generated documents."
        ),
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions for each epsilon.")] = 400,
    chosen: Annotated[int, typer.Option(help="Documents of a prompt.")] = 4,
    candidates: Annotated[int, typer.Option(help="Documents that the retriever returns.")] = 40,
    epsilon: Annotated[str, typer.Option(help="Losses of relevance, with commas; relevance is 0 to 1.")] = (
        "0,0.01,0.02,0.05"
    ),
    share: Annotated[float, typer.Option(help="The share of the documents that the pool has room for.")] = 0.1,
    reuse: Annotated[str, typer.Option(help="A reuse policy that reads modules.")] = "modular",
    seed: Annotated[int, typer.Option(help="Of documents and questions.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this .png, .svg or .pdf file.")] = None,
    dtype: DType = "float32",
    weights: Weights = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Retrieve among documents of nearly equal relevance those that are stored: time, hits, recall and answers."""

    check_plot(plot)
    if data is not None and documents is not None:
        raise ParameterError("--documents counts generated ones; leave it out with --data", code="parameter.conflict")
    epsilons = floats("--epsilon", epsilon, "0,0.02")
    with told_loading("the libraries"):
        from inlay.client.llm import LLM
        from inlay_lab.eval.reading_data import read_data
        from inlay_lab.eval.retrieval import (
            RetrievalSetting,
            draw_retrieval,
            measure_retrieval,
            retrieval_table,
        )

    setting = RetrievalSetting(
        documents=2_000 if documents is None else documents,
        questions=questions,
        chosen=chosen,
        candidates=candidates,
        epsilons=epsilons,
        share=share,
        reuse=reuse,
        seed=seed,
    )
    found = None if data is None else read_data(data)

    def make(size: int) -> LLM:
        with told_loading(f"the model {clip(model)}"):
            return LLM(model, dtype=dtype, weights=weights, store="off", promotion_memory=0, kv_memory=size)

    with token_progress("answers") as progress:
        result = measure_retrieval(make, setting, progress, data=found)
    if plot is not None:
        draw_retrieval(result, plot)
    print(json.dumps(result) if as_json else retrieval_table(result))
