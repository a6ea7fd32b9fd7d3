"""Drawings with matplotlib (the optional extra ``plots``): a schema's layout, and the memory of a cached token."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import ParameterError
from inlay.pml import Module, Param, Text, Turn, Union
from inlay.pml.rules import names_of
from inlay.prompt.layout import Hole, SchemaLayout, TextRun
from inlay.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: The content of a stretch of positions. ``unused``: positions that a member of a union leaves free.
KINDS = ("template", "always", "module", "parameter", "unused")


@dataclass(frozen=True, slots=True)
class Bar:
    """Positions ``start`` … ``start + length - 1`` and their content, one of KINDS."""

    start: int
    length: int
    kind: str


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One line of a drawing. ``depth`` is the indentation level of its label, ``note`` its counts as text."""

    label: str
    note: str
    depth: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Rows ``first`` … ``last`` within positions ``start`` … ``end - 1``: a module with its children, or a union."""

    first: int
    last: int
    start: int
    end: int
    depth: int
    union: bool


@dataclass
class Rows:
    """All rows from top to bottom, and the boxes around them, outer ones first."""

    rows: list[DrawnRow] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)


def rows_of(layout: SchemaLayout) -> Rows:
    """Return the rows of a schema: one for the always-present text of each turn or of the schema, and one for each
    module.
    """
    walk = _RowWalk(layout)
    turns = [child for child in layout.schema.children if isinstance(child, Turn)]
    *in_turns, beside = _always_present(layout, turns)
    if beside:
        walk.always("always present", beside)
    rows = iter(in_turns)
    for child in layout.schema.children:
        if isinstance(child, Turn):
            walk.always(f"<{child.role}>", next(rows))
            walk.children(child.children, 1)
        else:
            walk.children((child,), 0)
    return walk.found


def _always_present(layout: SchemaLayout, turns: Sequence[Turn]) -> list[list[Bar]]:
    """Return the bars of text outside of modules: one list for each turn, and last one for text outside of turns."""
    turn_of = {order: number for number, turn in enumerate(turns) for order in _texts(turn)}
    number_of = {layout.turn_of[turn.order]: number for number, turn in enumerate(turns)}
    present: list[list[Bar]] = [[] for _ in (*turns, None)]
    for run in layout.runs:
        at = run.start
        for part in run.parts if not run.owner else ():
            piece = part.closes if part.turn is None else part.turn
            number = turn_of.get(-1 if part.node is None else part.node, -1) if piece is None else number_of[piece]
            if part.ids:
                present[number].append(Bar(at, len(part.ids), "template" if part.node is None else "always"))
            at += len(part.ids)
    return present


def _texts(turn: Turn) -> list[int]:
    return [child.order for child in turn.children if isinstance(child, Text)]


@dataclass
class _RowWalk:
    layout: SchemaLayout
    found: Rows = field(default_factory=Rows)

    def always(self, label: str, bars: list[Bar]) -> None:
        self.row(label, 0, bars)

    def children(self, children: Sequence[Text | Param | Module | Union | Turn], depth: int) -> None:
        for child in children:
            if isinstance(child, Module):
                self.module(child, depth, None)
            elif isinstance(child, Union):
                self.union(child, depth)
            elif isinstance(child, Turn):  # a turn of a module
                self.children(child.children, depth)

    def union(self, union: Union, depth: int) -> None:
        extents = [self.layout.extents[self.layout.schema.paths[member.order]] for member in union.members]
        start, end = min(extent.start for extent in extents), max(extent.end for extent in extents)
        box = len(self.found.boxes)
        first = len(self.found.rows)
        for member in union.members:
            self.module(member, depth, end)
        self.found.boxes.insert(box, Box(first, len(self.found.rows) - 1, start, end, depth, union=True))

    def module(self, module: Module, depth: int, union_end: int | None) -> None:
        """Add a module. ``union_end`` is the end of its union, or None."""
        path = self.layout.schema.paths[module.order]
        extent = self.layout.extents[path]
        bars = [
            Bar(entry.start, len(entry.ids), "module") if isinstance(entry, TextRun) else _hole(entry)
            for entry in self.layout.by_owner.get(names_of(path), ())
        ]
        if union_end is not None and union_end > extent.end:
            bars.append(Bar(extent.end, union_end - extent.end, "unused"))
        box = len(self.found.boxes)
        first = len(self.found.rows)
        self.row(path, depth, bars)
        self.children(module.children, depth + 1)
        last = len(self.found.rows) - 1
        if last > first:
            self.found.boxes.insert(box, Box(first, last, extent.start, extent.end, depth, union=False))

    def row(self, label: str, depth: int, bars: list[Bar]) -> None:
        self.found.rows.append(DrawnRow(label, _note(bars), depth, tuple(bars)))


def _hole(hole: Hole) -> Bar:
    return Bar(hole.start, hole.length, "parameter")


def _note(bars: Sequence[Bar]) -> str:
    """Format the counts of text tokens, parameter positions and unused positions."""
    count = {kind: sum(bar.length for bar in bars if bar.kind == kind) for kind in KINDS}
    tokens = count["template"] + count["always"] + count["module"]
    parts = [counted(tokens, "token")]
    if count["parameter"]:
        parts.append(f"len {count['parameter']:,}")
    if count["unused"]:
        parts.append(f"{count['unused']:,} unused")
    return ", ".join(parts)


logger = logging.getLogger(__name__)

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 110  # of PNG files


def check_plot_file(path: Path) -> None:
    """Raise ParameterError if no drawing can be saved to the file, or if matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ParameterError(
            f"--plot is '{path}'; use a name that ends in {' or '.join(SUFFIXES)}", code="parameter.invalid_path"
        )
    if not path.parent.is_dir():
        raise ParameterError(
            f"--plot is '{path}' and there is no folder '{path.parent}'; make it first", code="parameter.invalid_path"
        )
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ParameterError(
            "drawing needs matplotlib; install it with: pip install 'inlay-llm[plots]'",
            code="parameter.missing_package",
        ) from None


def save(figure: Figure, path: Path, *, option: str = "--plot") -> None:
    """Write a figure; equal figures give equal SVG and PDF files. Raises ParameterError that names the option."""
    from matplotlib import rc_context

    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix.lower()]
    with rc_context({"svg.hashsalt": "inlay"}):
        try:
            figure.savefig(path, dpi=DPI, metadata=metadata)
        except OSError as error:
            raise ParameterError(
                f"{option} {path} cannot be written: {error.strerror or error}", code="parameter.unwritable_file"
            ) from error


@contextmanager
def one_font_warning(path: Path) -> Iterator[None]:
    """Log one warning for a whole figure if the font lacks characters, instead of one for each character."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if any("missing from font" in str(warning.message) for warning in caught):
        logger.warning("%s: the font lacks some characters of the names, which are drawn as boxes", path)


# Okabe and Ito's blue, and a light grey.
_KEPT, _OTHER = "#0072B2", "#BBBBBB"
_MARGIN = 1.12  # room for the numbers after the bars
_FONT = 9.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """MiB of one token of a model. ``kept`` is None if the model keeps nothing. ``other`` is a comparison, or None."""

    model: str
    kept: float | None
    other: float | None = None


def draw_memory(sizes: Sequence[Sizes], path: Path, *, kept: str, other: str = "") -> None:
    """Draw bars into a PNG, SVG or PDF file, with ``kept`` and ``other`` as legend. Raises ParameterError."""
    from matplotlib.figure import Figure

    with one_font_warning(path):
        compared = any(one.other is not None for one in sizes)
        figure = Figure(figsize=(8, 1.3 + (0.5 if compared else 0.3) * len(sizes)), layout="constrained")
        axes = figure.add_subplot()
        height = 0.38 if compared else 0.6
        for place, values, colour, label in (
            (height / 2 if compared else 0.0, [one.kept for one in sizes], _KEPT, kept),
            (-height / 2, [one.other for one in sizes], _OTHER, other),
        ):
            drawn = [(number + place, value) for number, value in enumerate(values) if value is not None]
            if drawn:
                bars = axes.barh([y for y, _ in drawn], [v for _, v in drawn], height, color=colour, label=label)
                axes.bar_label(bars, [f"{value:,.4f}" for _, value in drawn], padding=3, fontsize=_FONT)
        axes.set_yticks(range(len(sizes)), [one.model for one in sizes], fontsize=_FONT, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(0, _MARGIN * max(value for one in sizes for value in (one.kept, one.other) if value is not None))
        axes.set_xlabel("MiB a token", fontsize=_FONT)
        axes.tick_params(axis="x", labelsize=_FONT)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=_FONT)
        save(figure, path)


MAX_ROWS = 600

# Inches.
_ROW, _BARS, _INDENT, _GAP, _ABOVE, _BELOW = 0.26, 7.0, 0.18, 0.15, 1.25, 0.6
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
