"""The report has the paper's form and describes its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inlay import ParameterError
from inlay_lab.eval.longbench.datasets import DATASETS
from inlay_lab.eval.longbench.paper import PUBLISHED
from inlay_lab.eval.longbench.report import markdown, notes, write_report


def row(dataset: str, reuse: str, score: float, base: float) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "metric": "F1",
        "reuse": reuse,
        "positions": "packed",
        "samples": 200,
        "score": score,
        "reference": base,
        "difference": score - base,
        "difference_low": score - base - 1,
        "difference_high": score - base + 1,
        "better": 3,
        "worse": 4,
        "p_value": 0.25,
        "same_answers": 190,
        "documents": 9.5,
        "cut": 2,
        "cached": 0.97,
        "recomputed": None if reuse == "off" else 0.1,
        "ttft_s": 0.0125,
    }


def result(**changed: Any) -> dict[str, Any]:
    scores = {"hotpotqa": (40.0, 36.5, 43.0), "dureader": (20.0, 21.0, 22.5), "all": (30.0, 28.75, 32.75)}
    rows = [
        row(name, reuse, score, each[0])
        for name, each in scores.items()
        for reuse, score in zip(("off", "isolated", "anchored+profiled:0.1"), each, strict=True)
    ]
    return {
        "rows": rows,
        "model": "m",
        "dtype": "bfloat16",
        "quantization": None,
        "limit": None,
        "max_length": None,
        "max_model_len": 4096,
        "chat": True,
        "own_templates": [],
        "own_limits": [],
        "absent": [],
    } | changed


def test_first_table_has_the_papers_form() -> None:
    text = markdown(result())
    table = text.partition("## Accuracy\n\n")[2].partition("\n\n")[0].splitlines()
    assert table == [
        "| Dataset | Metric | Baseline | isolated | anchored+profiled:0.1 |",
        "| --- | --- | --- | --- | --- |",
        "| HotpotQA | F1 | **40.00** | 36.50 | **43.00** |",
        "| DuReader | F1 | 20.00 | 21.00 | 22.50 |",
        "| Mean of the datasets | F1 | 30.00 | 28.75 | **32.75** |",
    ]


def test_policies_are_compared_with_the_baseline() -> None:
    text = markdown(result())
    line = "| HotpotQA | isolated | 200 | -3.50 | -4.50 to -2.50 | 3 / 4 | 0.25 | 190 | 9.5 | 97.0% | 10.0% | 12.5 |"
    assert line in text.splitlines()
    assert "| HotpotQA | 18.32 / 19.34 | 22.21 / 23.35 | 18.97 / 20.11 | 12.37 / 13.22 |" in text.splitlines()
    assert "## Against the baseline" not in markdown(result(rows=result()["rows"][::3]))


def test_notes_describe_the_data() -> None:
    assert notes(result()) == [
        "400 rows of 2 of 21 datasets.",
        "The benchmark's templates.",
        "The limits of answers are those of config/dataset2maxlen.json.",
        "4 prompts were too long and cut in the middle; the model's context is 4,096 tokens.",
        "Prompts stand in the model's chat template, but for the datasets that the benchmark leaves without.",
    ]
    told = notes(
        result(own_templates=["hotpotqa"], own_limits=["hotpotqa", "dureader"], absent=["lcc"], limit=200, chat=False)
        | {"max_length": 3500}
    )
    assert told[0] == "400 rows of 2 of 21 datasets, the first 200 of each; not in the folder: lcc."
    assert told[1].startswith(
        "Templates of inlay's own, not the benchmark's, for hotpotqa: their scores are not comparable"
    )
    assert told[2].startswith("The published limits of answers for all datasets")
    assert "cut in the middle to 3,500 tokens" in told[3]
    assert told[4] == "The model has no chat template; prompts are plain text."


def test_the_papers_figures_are_of_datasets() -> None:
    assert set(PUBLISHED) < set(DATASETS)
    assert len(PUBLISHED) == 12
    assert {len(models) for models in PUBLISHED.values()} == {4}


def test_files_are_written_or_refused(tmp_path: Path) -> None:
    write_report(result(), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == result()
    assert (tmp_path / "report.md").read_text() == markdown(result()) + "\n"
    with pytest.raises(ParameterError, match=r"--report .*nowhere/report\.json cannot be written"):
        write_report(result(), tmp_path / "nowhere")
