"""The report of ``inlay eval modular-qa``: the cost of each policy against its agreement with full prefill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from inlay.wording import markdown_table
from inlay_lab.eval.curve import draw_curves
from inlay_lab.eval.points import COUNTS, NOTICED, Point, Row, counting, points
from inlay_lab.eval.setting import model_words
from inlay_lab.reports import write_texts


def write_report(result: Row, directory: Path) -> None:
    """Write ``report.json``, ``report.md`` and its figures. Raises ParameterError.

    Args:
        result: The return value of ``measure_modular_qa``.
        directory: An existing directory.
    """
    drawings = draw_curves(result, directory)
    write_texts(directory, {"report.json": json.dumps(result, indent=1), "report.md": _markdown(result, drawings)})


def _markdown(result: Row, drawings: Iterable[str]) -> str:
    head = f"{model_words(result)}, seed {result['seed']}, order of documents: {result['order']}"
    sections = ["# modular-qa", head + "."]
    sections += [f"![{name.partition('.')[0]}]({name})" for name in drawings]
    for documents in dict.fromkeys(row["documents"] for row in result["rows"]):
        sections += _section(result, documents)
    if "repeated" in result:
        sections += ["## Asked again and again under `modular`", _REPEATED, _repeated(result["repeated"])]
    return "\n\n".join(sections)


_REPEATED = (
    "Idle time follows each repetition. It encodes repeated combinations of modules as full prefill has them. "
    "Approximate: the share of the prompts' tokens that were read as modules encoded in another context. Promoted: "
    "tokens computed in that idle time, for each question."
)


def _repeated(rows: Sequence[Row]) -> str:
    names = ["documents", "time", "questions", "exact match", "full prefill", "KL (nats)", "largest KL", "approximate"]
    lines = [
        [
            *(f"{row[name]:,}" for name in ("documents", "repetition", "questions")),
            *(f"{row[name]:.3f}" for name in ("exact_match", "reference")),
            *(f"{row[name]:.3g}" for name in ("kl", "most_kl")),
            f"{row['approximate']:.1%}",
            f"{row['promoted_tokens']:,.0f}",
            f"{1000 * row['ttft_s']:.1f}",
        ]
        for row in rows
    ]
    return markdown_table([*names, "promoted", "TTFT (ms)"], lines)


def _section(result: Row, documents: int) -> list[str]:
    counted = counting(result, documents)
    left_out = [task for task in result["tasks"] if task not in counted]
    told = f"Full prefill is right in {COUNTS:.0%} or more of: {', '.join(counted) or 'no task, so all are shown'}."
    if counted and left_out:
        told += f" Not counted: {', '.join(left_out)}."
    section = [f"## {documents} documents", told, _overview([p for p in points(result) if p.documents == documents])]
    of_task = {
        task: [point for point in points(result, [task]) if point.documents == documents] for task in result["tasks"]
    }
    for title, cell in (
        ("Exact match, and the lower 95% bound of its difference to full prefill", _match),
        ("KL (nats a token)", lambda point: f"{point.kl:.3g}"),
    ):
        labels = [point.label for point in next(iter(of_task.values()))]
        lines = [[label, *(cell(of[at]) for of in of_task.values())] for at, label in enumerate(labels)]
        section += [f"### {title}", markdown_table(["reuse", *of_task], lines)]
    return section


def _match(point: Point) -> str:
    return f"{point.exact_match:.3f} ({_signed(point.difference[1])})"


def _signed(difference: float) -> str:
    return f"{round(difference, 3) + 0.0:+.3f}"  # no minus before a zero


def _overview(found: Sequence[Point]) -> str:
    names = ["reuse", "recomputed", "TTFT (ms)", "questions", "exact match", "difference", "95% bounds", "KL (nats)"]
    lines = []
    for point in found:
        difference, low, high = point.difference
        lines.append(
            [
                point.label,
                "" if point.recomputed is None else f"{point.recomputed:.1%}",
                f"{1000 * point.ttft_s:.1f}",
                f"{point.questions:,}",
                f"{point.exact_match:.3f}",
                _signed(difference),
                f"{_signed(low)} to {_signed(high)}" + (" ✓" if low >= NOTICED else ""),
                f"{point.kl:.3g}",
            ]
        )
    return markdown_table(names, lines) + f"\n\n✓: the lower bound is at least {NOTICED}."
