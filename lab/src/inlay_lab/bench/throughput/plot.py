"""Figures of the workloads: time to the first token over the hit rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.authoring.plot import save
from inlay_lab.drawing import add_legend, figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours.
_OURS, _OFF = "#0072B2", "#D55E00"


@figure_style()
def draw_hit_rates(result: dict[str, Any], path: Path) -> None:
    """Draw a panel for every workload and a row of panels for every model.

    Args:
        result: The return value of ``measure_throughput``, with rows of ``workloads``.

    Raises:
        ParameterError: The file cannot be written in that format.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["part"] == "workloads"]
    models, kinds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "workload"))
    figure = Figure(figsize=(0.8 + 3.2 * len(kinds), 0.8 + 2.8 * len(models)))
    panels = figure.subplots(len(models), len(kinds), squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for axes, kind in zip(line, kinds, strict=True):
            draw_times(axes, [row for row in rows if (row["model"], row["workload"]) == (model, kind)])
            axes.set_title(f"{kind}\n{model}")
        line[0].set_ylabel("time to the first token, s")
    add_legend(figure, 3)
    save(figure, path)


def draw_times(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw times to the first token over the hit rate, for one model and workload."""
    cells = [cell for cell in (row["columns"]["inlay"] for row in rows) if "skipped" not in cell]
    points = sorted(((100 * cell["hit_rate"], cell["ttft_ms"]) for cell in cells), key=lambda point: point[0])
    for percentile, style in (("p50", "o-"), ("p90", "^--")):
        seconds = [ttft[percentile] / 1000 for _, ttft in points]
        axes.plot([rate for rate, _ in points], seconds, style, color=_OURS, markersize=4, label=f"inlay, {percentile}")
    off = rows[0]["columns"].get("off", {})
    if "ttft_ms" in off:
        axes.axhline(off["ttft_ms"]["p50"] / 1000, color=_OFF, linewidth=1, label="nothing shared, p50")
    axes.set_xlabel("tokens of prompts that were stored, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
