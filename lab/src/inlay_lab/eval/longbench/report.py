"""The report of ``inlay eval longbench``: the paper's table, the paired tests, and notes on the data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from inlay.wording import markdown_table
from inlay_lab.eval.longbench.datasets import DATASETS
from inlay_lab.eval.longbench.paper import MODELS, OUTLIER, PUBLISHED
from inlay_lab.eval.setting import model_words
from inlay_lab.reports import write_texts

Row = dict[str, Any]
BASELINE = "Baseline"


def write_report(result: Row, directory: Path) -> None:
    """Write ``report.json`` and ``report.md``. Raises ParameterError.

    Args:
        result: The return value of ``measure_longbench``.
        directory: An existing directory.
    """
    write_texts(directory, {"report.json": json.dumps(result, indent=1), "report.md": markdown(result)})


def markdown(result: Row) -> str:
    """The report as Markdown."""
    sections = [
        "# LongBench",
        f"{model_words(result)}.",
        "\n".join(f"- {note}" for note in notes(result)),
        "## Accuracy",
        markdown_table(*scores(result)),
        f"{BASELINE} is full prefill. Of two figures that differ by more than {OUTLIER}, the higher one is bold, as in "
        "the paper (arXiv 2311.04934, Tables 1 and 3).",
    ]
    compared = [row for row in result["rows"] if row["reuse"] != "off"]
    if compared:
        sections += ["## Against the baseline, question by question", markdown_table(*_tests(compared)), _LEGEND]
    published = [row["dataset"] for row in result["rows"] if row["reuse"] == "off" and row["dataset"] in PUBLISHED]
    if published:
        table = markdown_table(*_published(published))
        sections += ["## As published", table, "Baseline and cached, of the paper's Table 3."]
    return "\n\n".join(sections)


_LEGEND = (
    "Difference: of the mean score, with the 95% interval of the bootstrap. p: a two-sided paired permutation test; "
    "one of twenty is below 0.05 by chance. Same: answers equal to the baseline's to the letter. Cached: share of the "
    "prompts' tokens that came from the store; computed anew: of modules' tokens. TTFT: the median, modules encoded."
)


def notes(result: Row) -> list[str]:
    """Sentences on the data and settings behind the figures."""
    rows = [row for row in result["rows"] if row["reuse"] == "off" and row["dataset"] != "all"]
    own, limits, cut = result["own_templates"], result["own_limits"], sum(row["cut"] for row in rows)
    samples = sum(row["samples"] for row in rows)
    told = [
        f"{samples:,} rows of {len(rows)} of {len(DATASETS)} datasets"
        + (f", the first {result['limit']:,} of each" if result["limit"] else "")
        + (f"; not in the folder: {', '.join(result['absent'])}." if result["absent"] else ".")
    ]
    if own:
        told.append(
            f"Templates of inlay's own, not the benchmark's, for {_named(own, rows)}: their scores are not comparable "
            "with published ones. The benchmark's stand in its config/dataset2prompt.json."
        )
    else:
        told.append("The benchmark's templates.")
    told.append(
        f"The published limits of answers for {_named(limits, rows)}, in place of a config/dataset2maxlen.json."
        if limits
        else "The limits of answers are those of config/dataset2maxlen.json."
    )
    longest = "" if result["max_length"] is None else f" to {result['max_length']:,} tokens"
    told.append(
        f"{cut:,} prompts were too long and cut in the middle{longest}; the model's context is "
        f"{result['max_model_len']:,} tokens."
    )
    told.append(
        "Prompts stand in the model's chat template, but for the datasets that the benchmark leaves without."
        if result["chat"]
        else "The model has no chat template; prompts are plain text."
    )
    return told


def scores(result: Row) -> tuple[list[str], list[list[str]]]:
    """The paper's table: a row for each dataset, a column for the baseline and for each policy."""
    policies = list(dict.fromkeys(row["reuse"] for row in result["rows"]))
    cells = {(row["dataset"], row["reuse"]): row for row in result["rows"]}
    lines = []
    for dataset in dict.fromkeys(row["dataset"] for row in result["rows"]):
        rows = [cells[dataset, policy] for policy in policies]
        base = rows[0]["score"]
        lowest = min((row["score"] for row in rows[1:]), default=base)
        lines.append(
            [
                title(dataset),
                rows[0]["metric"],
                _bold(base, base - lowest > OUTLIER),
                *(_bold(row["score"], row["score"] - base > OUTLIER) for row in rows[1:]),
            ]
        )
    return ["Dataset", "Metric", BASELINE, *policies[1:]], lines


def title(dataset: str) -> str:
    """A dataset's name in tables."""
    return DATASETS[dataset].title if dataset in DATASETS else "Mean of the datasets"


def _tests(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    names = ["Dataset", "Reuse", "Rows", "Difference", "95% interval", "Better / worse", "p", "Same"]
    names += ["Documents", "Cached", "Computed anew", "TTFT (ms)"]
    lines = []
    for row in rows:
        line = [
            title(row["dataset"]),
            row["reuse"],
            f"{row['samples']:,}",
            f"{row['difference']:+.2f}",
            f"{row['difference_low']:+.2f} to {row['difference_high']:+.2f}",
            f"{row['better']:,} / {row['worse']:,}",
            f"{row['p_value']:.3g}",
            f"{row['same_answers']:,}",
        ]
        of_one = row["dataset"] in DATASETS
        line += [f"{row['documents']:g}", f"{row['cached']:.1%}"] if of_one else ["", ""]
        line += [_anew(row), f"{1000 * row['ttft_s']:.1f}"] if of_one else ["", ""]
        lines.append(line)
    return names, lines


def _anew(row: Row) -> str:
    return "" if row["recomputed"] is None else f"{row['recomputed']:.1%}"


def _published(datasets: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    lines = [
        [title(name), *(f"{baseline:.2f} / {cached:.2f}" for baseline, cached in PUBLISHED[name])] for name in datasets
    ]
    return ["Dataset", *MODELS], lines


def _named(datasets: Sequence[str], rows: Sequence[Row]) -> str:
    return "all datasets" if len(datasets) == len(rows) else ", ".join(datasets)


def _bold(score: float, stressed: bool) -> str:
    return f"**{score:.2f}**" if stressed else f"{score:.2f}"
