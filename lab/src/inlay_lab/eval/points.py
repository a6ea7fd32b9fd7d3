"""The rows of a result as points of a curve: several tasks as one, over those that count.

Tasks count where full prefill itself gets them right.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inlay.check.statistics import difference_interval

COUNTS = 0.7  # exact match of full prefill, from which a task counts
NOTICED = -0.02  # a difference of exact match; above it is what full prefill answers, for all that matters

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """What one mode made of the tasks that count, with so many documents.

    label: of the mode. family: of policies that differ in a number alone, and of the one that they start from.
    reference: full prefill's exact match. difference: of exact match to full prefill's, with its 95% bounds.
    recomputed: share of the modules' tokens, None where no module is read. kl: nats a token. ttft_s: seconds.
    """

    label: str
    family: str
    documents: int
    questions: int
    exact_match: float
    reference: float
    difference: tuple[float, float, float]
    kl: float
    recomputed: float | None
    ttft_s: float


def points(result: Row, tasks: Sequence[str] | None = None) -> list[Point]:
    """A point for each mode and number of documents, in the order of the rows.

    tasks: those to take; None for those that count, or for all where none does.
    """
    rows = [row for row in result["rows"] if row["task"] != "all"]
    several = len({row["positions"] for row in rows if row["reuse"] != "off"}) > 1
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        ending = (f", {row['positions']}" if several else "") + (", scaffold" if row["scaffold"] else "")
        family = row["reuse"].partition(":")[0] + ending
        groups.setdefault((row["reuse"] + ending, family, row["documents"]), []).append(row)
    return [_point(*key, _taken(group, tasks)) for key, group in groups.items()]


def counting(result: Row, documents: int) -> list[str]:
    """The tasks that count with so many documents."""
    rows = [row for row in result["rows"] if row["documents"] == documents and row["task"] != "all"]
    return list(dict.fromkeys(row["task"] for row in rows if row["reference"] >= COUNTS))


def _taken(rows: Sequence[Row], tasks: Sequence[str] | None) -> list[Row]:
    if tasks is not None:
        return [row for row in rows if row["task"] in tasks]
    return [row for row in rows if row["reference"] >= COUNTS] or list(rows)


def _point(label: str, family: str, documents: int, rows: Sequence[Row]) -> Point:
    """The rows of some tasks as one: questions of all of them together."""
    questions = sum(row["questions"] for row in rows)

    def mean(name: str) -> float:
        return float(sum(row[name] * row["questions"] for row in rows) / questions)

    lost, won = (sum(row[name] for row in rows) for name in ("only_reference", "only_this"))
    return Point(
        label,
        family,
        documents,
        questions,
        mean("exact_match"),
        mean("reference"),
        ((won - lost) / questions, *difference_interval(lost, won, questions)),
        mean("kl"),
        None if any(row["recomputed"] is None for row in rows) else mean("recomputed"),
        statistics.median(row["ttft_s"] for row in rows),
    )
