"""The style that the lab's figures share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "figure.titlesize": "medium",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "xtick.labelsize": "small",
    "ytick.labelsize": "small",
}


@contextmanager
def figure_style(font: float = 9.0) -> Iterator[None]:
    """Give the style to figures that are made and saved within the block. It decorates functions too.

    Args:
        font: Size of titles, labels and legends, in points.
    """
    from matplotlib import rc_context

    with rc_context({**_STYLE, "font.size": font}):
        yield


def add_legend(
    figure: Figure,
    columns: int,
    place: Literal["outside lower center", "outside upper center"] = "outside lower center",
) -> None:
    """Add one legend for all panels, with each label once."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        named |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc=place, ncols=columns)
