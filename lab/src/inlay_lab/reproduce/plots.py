"""Figures of the report: pairs and lines. Other experiments use their benchmark's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inlay.authoring.plot import save
from inlay_lab.drawing import add_legend, figure_style

# Okabe and Ito's colours, with a different marker for each line.
_ONE, _OTHER = ("#D55E00", "s"), ("#0072B2", "o")
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#999999", "x"))


@figure_style()
def draw_pairs(data: Mapping[str, Any], path: Path, *, names: tuple[str, str], axis: str) -> None:
    """Draw two marks for each label on a logarithmic scale, with the ratio of the first to the second.

    Args:
        data: ``labels``, ``one`` and ``other`` of equal length, and ``title``.
        names: Legends of both marks.
        axis: Label of the axis.
    """
    from matplotlib.figure import Figure

    labels, one, other = data["labels"], data["one"], data["other"]
    figure = Figure(figsize=(8.5, 1.4 + 0.42 * len(labels)))
    axes = figure.add_subplot()
    rows = range(len(labels))
    axes.hlines(rows, other, one, color="#CCCCCC", linewidth=2)
    for values, (colour, marker), name in ((one, _ONE, names[0]), (other, _OTHER, names[1])):
        axes.plot(values, rows, marker, color=colour, markersize=7, label=name)
    for number, (long, short) in enumerate(zip(one, other, strict=True)):
        axes.annotate(
            f"{long / short:.1f}×", (max(long, short), number), xytext=(8, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(min(*one, *other) / 1.5, max(*one, *other) * 2)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(axis)
    axes.grid(visible=False, axis="y")
    figure.suptitle(data["title"])
    add_legend(figure, 2)
    save(figure, path)


@figure_style()
def draw_lines(panels: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw panels of ``lines`` (name → points of two numbers) with ``title``, ``x`` and ``y`` as labels.

    A panel's vertical axis is logarithmic with ``log``, else it begins at 0.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 4.2 * len(panels), 3.9))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for (name, points), (colour, marker) in zip(panel["lines"].items(), _STYLES, strict=False):
            axes.plot(*zip(*points, strict=True), marker, color=colour, linestyle="-", markersize=4, label=name)
        axes.set_title(panel["title"])
        axes.set_xlabel(panel["x"])
        axes.set_ylabel(panel["y"])
        if panel.get("log"):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.legend()
    save(figure, path)
