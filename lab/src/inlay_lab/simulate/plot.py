"""Figures of simulated clusters: the time to the first token over the load, a panel for each kind of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.authoring.plot import save
from inlay_lab.drawing import add_legend, figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"module": "#0072B2", "prefix": "#D55E00", "power-of-two": "#009E73", "round-robin": "#999999"}


@figure_style()
def draw_simulation(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw means and 99th percentiles of every router into a PNG, SVG or PDF file.

    Args:
        rows: The rows of ``inlay simulate --json``.

    Raises:
        ParameterError: The file cannot be written in that format.
    """
    from matplotlib.figure import Figure

    traffic = list(dict.fromkeys(row["traffic"] for row in rows))
    figure = Figure(figsize=(1 + 3.2 * len(traffic), 3.6))
    panels = figure.subplots(1, len(traffic), squeeze=False)
    for axes, kind in zip(panels.flat, traffic, strict=True):
        _draw(axes, [row for row in rows if row["traffic"] == kind])
        axes.set_title(kind)
    panels.flat[0].set_ylabel("time to the first token, s")
    add_legend(figure, 4)
    save(figure, path)


def _draw(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for router in dict.fromkeys(row["router"] for row in rows):
        mine = sorted((row for row in rows if row["router"] == router), key=lambda row: row["load"] or 0)
        loads = [100 * (row["load"] or 0) for row in mine]
        for name, style, said in (("ttft_mean_s", "o-", "mean"), ("ttft_p99_s", "^--", "p99")):
            seconds = [row[name] for row in mine]
            axes.plot(loads, seconds, style, color=_COLOURS[router], markersize=4, label=f"{router}, {said}")
    axes.set_xlabel("load, % of what replicas serve with nothing stored")
    axes.set_yscale("log")
