"""Draws a schema's layout: position ranges as bars, with a row for each module.

Modules are inside the boxes of their parents. Members of a union start at the same position (Prompt Cache, arXiv
2311.04934, section 3.3), and the drawing shows the positions that shorter members leave unused. Names and numbers are
in columns beside the bars, so they stay readable beside short bars.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.authoring.plot.figure import one_font_warning, save
from inlay.authoring.plot.rows import KINDS, DrawnRow, Rows, rows_of
from inlay.errors import ParameterError
from inlay.prompt.layout import SchemaLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS = 600

# Inches.
_ROW, _BARS, _INDENT, _GAP, _ABOVE, _BELOW = 0.26, 7.0, 0.18, 0.15, 1.25, 0.6
_FONT = 9.0
_LONGEST_NAME = 40  # characters

# Okabe and Ito's colours are distinct for any colour vision; the patterns differ too.
_Look = dict[str, Any]
_LOOKS: dict[str, _Look] = {
    "template": {"facecolor": "#56B4E9", "edgecolor": "#56B4E9"},
    "always": {"facecolor": "#0072B2", "edgecolor": "#0072B2"},
    "module": {"facecolor": "#E69F00", "edgecolor": "#E69F00"},
    "parameter": {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "//////"},
    "unused": {"facecolor": "white", "edgecolor": "#999999", "hatch": "-----"},
}
_UNION: _Look = {"facecolor": "none", "edgecolor": "#CC79A7", "linestyle": (0, (4, 2)), "linewidth": 1.2}
_PARENT: _Look = {"facecolor": "#00000010", "edgecolor": "#777777", "linewidth": 0.6}
_WORDS = {
    "template": "chat template",
    "always": "always-present text",
    "module": "text of a module",
    "parameter": "parameter (len)",
    "unused": "unused in a union",
}


def draw_layout(layout: SchemaLayout, path: Path) -> None:
    """Draw a schema's layout into a PNG, SVG or PDF file. Raises ParameterError."""
    with one_font_warning(path):
        save(layout_figure(layout), path)


def layout_figure(layout: SchemaLayout) -> Figure:
    """Return the drawing before it is saved. Raises ParameterError for a schema with too many modules."""
    from matplotlib.figure import Figure

    found = rows_of(layout)
    if len(found.rows) > MAX_ROWS:
        raise ParameterError(
            f"the schema has {len(found.rows):,} modules and turns, and a drawing shows at most {MAX_ROWS}; "
            "leave --plot out and read the tree, or draw a part of the schema",
            code="schema.too_large_to_draw",
        )
    names, notes = _columns(found.rows)
    width, height = names + _GAP + _BARS + _GAP + notes + _GAP, _ABOVE + _ROW * max(1, len(found.rows)) + _BELOW
    figure = Figure(figsize=(width, height))
    place = (names + _GAP) / width, _BELOW / height, _BARS / width, (height - _ABOVE - _BELOW) / height
    axes = figure.add_axes(place)
    _set_up(axes, layout, len(found.rows))
    _draw_boxes(axes, found)
    _draw_rows(axes, found.rows)
    _write_columns(axes, found.rows, names)
    _write_title(figure, layout, height)
    _write_legend(figure, found, height)
    return figure


def _columns(rows: list[DrawnRow]) -> tuple[float, float]:
    """Return the widths of the names and the notes, in inches."""
    names = max((row.depth * _INDENT + _width(_clip(row.label)) for row in rows), default=0.0)
    notes = max((_width(row.note) for row in rows), default=0.0)
    return names + _GAP, notes


def _width(text: str) -> float:
    from matplotlib.textpath import TextPath

    width = float(TextPath((0, 0), text, size=_FONT, usetex=False).get_extents().width)
    return 1.08 * width / 72  # in a PNG every letter begins at a whole pixel


def _clip(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _set_up(axes: Axes, layout: SchemaLayout, rows: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(0, max(1, layout.length))
    axes.set_ylim(max(1, rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(axis="x", top=True, labeltop=True, labelsize=_FONT)
    axes.set_xlabel("position", fontsize=_FONT)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("left", "right"):
        axes.spines[side].set_color("0.8")


def _draw_boxes(axes: Axes, found: Rows) -> None:
    """Draw the boxes. Outer boxes extend farther up and down than inner ones, so no two edges coincide."""
    from matplotlib.patches import Rectangle

    deepest = max((box.depth for box in found.boxes), default=0) + 1
    for order, box in enumerate(found.boxes):
        level = box.depth + (0.5 if not box.union else 0.0)
        pad = 0.32 + 0.16 * (1 - level / deepest)
        corner = box.start, box.first - pad
        size = max(box.end - box.start, 0), box.last - box.first + 2 * pad
        look = _UNION if box.union else _PARENT
        axes.add_patch(Rectangle(corner, *size, zorder=1 + order / 1e4, clip_on=False, **look))


def _draw_rows(axes: Axes, rows: list[DrawnRow]) -> None:
    from matplotlib.patches import Rectangle

    for number, row in enumerate(rows):
        axes.axhline(number, color="0.85", linewidth=0.5, zorder=0.5)  # leads from a name to its bar
        for bar in row.bars:
            corner = bar.start, number - 0.24
            axes.add_patch(Rectangle(corner, bar.length, 0.48, linewidth=0.7, zorder=3, **_LOOKS[bar.kind]))


def _write_columns(axes: Axes, rows: list[DrawnRow], names: float) -> None:
    """Write names to the left of the bars and numbers to the right, in inches from the edges of the axes."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.figure
    for number, row in enumerate(rows):
        offset = ScaledTranslation(row.depth * _INDENT - names, 0, figure.dpi_scale_trans)
        left = axes.get_yaxis_transform() + offset
        right = axes.get_yaxis_transform() + ScaledTranslation(_GAP, 0, figure.dpi_scale_trans)
        style: _Look = {"fontsize": _FONT, "va": "center", "ha": "left", "parse_math": False}
        axes.text(0, number, _clip(row.label), transform=left, **style)
        axes.text(1, number, row.note, transform=right, color="0.3", **style)


def _write_title(figure: Figure, layout: SchemaLayout, height: float) -> None:
    tokens = sum(len(run.ids) for run in layout.runs)
    title = f"{_clip(layout.schema.name)}: {tokens:,} tokens, {layout.length:,} positions"
    figure.text(0.5, 1 - 0.2 / height, title, ha="center", va="center", fontsize=11, parse_math=False)


def _write_legend(figure: Figure, found: Rows, height: float) -> None:
    from matplotlib.patches import Patch

    kinds = {bar.kind for row in found.rows for bar in row.bars}
    patches = [Patch(label=_WORDS[kind], **_LOOKS[kind]) for kind in KINDS if kind in kinds]
    if any(not box.union for box in found.boxes):
        patches.append(Patch(label="module with modules in it", **_PARENT))
    if any(box.union for box in found.boxes):
        patches.append(Patch(label="union: one of these", **_UNION))
    figure.legend(
        handles=patches,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.34 / height),
        ncols=4,
        frameon=False,
        fontsize=_FONT,
        handlelength=1.6,
    )
