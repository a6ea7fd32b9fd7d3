"""Figures of the attention benchmark: a row of panels for each dtype and head count, a column for each part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.authoring.plot import save
from inlay_lab.drawing import add_legend, figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours. Each column has its own marker too, so no line is told by colour alone.
_STYLES = {
    "ours": ("#0072B2", "o"),
    "paged": ("#E69F00", "s"),
    "unshared": ("#56B4E9", "^"),
    "sdpa": ("#009E73", "v"),
    "flash": ("#CC79A7", "D"),
    "naive": ("#999999", "x"),
}
_TITLES = {
    "table3": "table 3: one decode step",
    "figure3": "figure 3: sequences diverge",
    "figure4": "figure 4: all share everything",
}


@figure_style(font=8.0)
def draw_attention(result: dict[str, Any], path: Path) -> None:
    """Draw the table as bars and both figures as lines into a PNG, SVG or PDF file.

    Args:
        result: The return value of ``measure_attention``, with at least one of these parts.

    Raises:
        ParameterError: The file cannot be written in that format.
    """
    from matplotlib.figure import Figure

    parts = [part for part in _TITLES if result.get(part)]
    kinds = list(dict.fromkeys((row["dtype"], row["heads"], row["kv_heads"]) for row in result[parts[0]]))
    figure = Figure(figsize=(1.5 + 4.8 * len(parts), 0.6 + 2.9 * len(kinds)))
    panels = figure.subplots(len(kinds), len(parts), squeeze=False)
    for line, (dtype, heads, kv_heads) in zip(panels, kinds, strict=True):
        for axes, part in zip(line, parts, strict=True):
            rows = [
                row for row in result[part] if (row["dtype"], row["heads"], row["kv_heads"]) == (dtype, heads, kv_heads)
            ]
            (_bars if part == "table3" else _lines)(axes, rows, part)
            axes.set_title(f"{_TITLES[part]} — {dtype}, {heads}/{kv_heads} heads")
    add_legend(figure, 6, "outside upper center")
    save(figure, path)


def _bars(axes: Axes, rows: list[dict[str, Any]], part: str) -> None:
    """Milliseconds, on a logarithmic scale, since the columns are decades apart."""
    columns = list(rows[0]["columns"])
    width = 0.85 / len(columns)
    for number, column in enumerate(columns):
        known = [
            (place, row["columns"][column]["ms"]) for place, row in enumerate(rows) if "ms" in row["columns"][column]
        ]
        if known:
            places = [place + (number - (len(columns) - 1) / 2) * width for place, _ in known]
            axes.bar(places, [ms for _, ms in known], width, color=_STYLES[column][0], label=column)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [f"{row['context']}\n{row['shared']}" for row in rows])
    _finish(axes, "context tokens, and how many are shared", "ms")


def _lines(axes: Axes, rows: list[dict[str, Any]], part: str) -> None:
    """Tokens a second of this one layer, as the paper draws them."""
    along = [row["context"] - row["shared"] if part == "figure3" else row["batch"] for row in rows]
    for column in rows[0]["columns"]:
        known = [
            (x, row["columns"][column]["tokens_s"])
            for x, row in zip(along, rows, strict=True)
            if "ms" in row["columns"][column]
        ]
        if known:
            colour, marker = _STYLES[column]
            axes.plot(
                [x for x, _ in known], [y for _, y in known], color=colour, marker=marker, markersize=4, label=column
            )
    axes.set_yscale("log")
    _finish(
        axes,
        "private tokens of each sequence" if part == "figure3" else "sequences in the batch",
        "tokens/s, one layer",
    )


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=False, axis="x")
