"""The rows of a result as points of a curve, with several tasks combined.

By default only those tasks count that full prefill itself gets right.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inlay.check.statistics import difference_interval

COUNTS = 0.7  # exact match of full prefill from which a task counts
NOTICED = -0.02  # difference of exact match; a smaller loss is not noticeable

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """The result of one mode over the counted tasks, for one number of documents.

    Attributes:
        label: Of the mode.
        family: Of policies that differ only in a number.
        reference: Full prefill's exact match.
        difference: Of exact match to full prefill's, with its 95% bounds.
        recomputed: Share of the modules' tokens; None if no module is read.
        kl: Divergence in nats a token.
        ttft_s: In seconds.
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

    Args:
        tasks: Tasks to include; None for those that count, or for all if none does.
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
    """The tasks that count with this number of documents."""
    rows = [row for row in result["rows"] if row["documents"] == documents and row["task"] != "all"]
    return list(dict.fromkeys(row["task"] for row in rows if row["reference"] >= COUNTS))


def _taken(rows: Sequence[Row], tasks: Sequence[str] | None) -> list[Row]:
    if tasks is not None:
        return [row for row in rows if row["task"] in tasks]
    return [row for row in rows if row["reference"] >= COUNTS] or list(rows)


def _point(label: str, family: str, documents: int, rows: Sequence[Row]) -> Point:
    """The rows of some tasks as one point over all their questions."""
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
