"""A drawing of a sweep: time to first token over the length of the prompt, as figure 5 of Prompt Cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.plot.figure import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours.
_CURVES = (
    ("full_prefill_ms", "full prefill, stock transformers", "#D55E00", "s"),
    ("ttft_ms", "inlay, modules cached", "#0072B2", "o"),
    ("bound_ms", "the new tokens alone, nothing cached", "#999999", "x"),
)
_FONT = 9.0


def draw_ttft(result: dict[str, Any], path: Path) -> None:
    """Draw points and fits, linear on the left and logarithmic on the right. Raises ParameterError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        _draw(axes, result)
        axes.set_xlabel("prompt tokens", fontsize=_FONT)
        axes.tick_params(labelsize=_FONT - 1)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    left.set_ylabel("time to first token, s", fontsize=_FONT)
    left.set_ylim(bottom=0)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    figure.suptitle(f"{result['model']}, {result['dtype']}, {result['machine']['threads']} threads", fontsize=_FONT + 1)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=_FONT)
    save(figure, path)


def _draw(axes: Axes, result: dict[str, Any]) -> None:
    for name, label, colour, marker in _CURVES:
        points = [(row["cached"] + row["new"], row[name] / 1000) for row in result["rows"] if row[name] is not None]
        if not points:
            continue
        x = np.array([tokens for tokens, _ in points])
        axes.plot(x, [seconds for _, seconds in points], marker, color=colour, markersize=5, label=label)
        curve = (result["fits"] or {}).get(name)
        if curve is not None:
            along = np.geomspace(x.min(), x.max(), 100)
            axes.plot(along, np.polyval(curve["coefficients"][::-1], along) / 1000, color=colour, linewidth=1)
