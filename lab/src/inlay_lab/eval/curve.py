"""Figures of a report: exact match and divergence over recomputed tokens, time to first token and number of
documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.authoring.plot import save
from inlay_lab.drawing import add_legend, figure_style
from inlay_lab.eval.points import NOTICED, Point, counting, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours. Each line has its own marker too, so none is told by colour alone.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#000000")
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")
_MARGIN = 0.02  # of the axis of a share, so that points at 0 and 1 are fully visible
_SMALLEST_KL = 1e-4  # the axis is linear below it, so that zero has a place
_EXACT_KL = 1e-8  # the same for promotion, where the divergence falls to rounding

_Style = dict[str, Any]
_X = Callable[[Point], float | None]


@figure_style(font=8.0)
def draw_curves(result: dict[str, Any], directory: Path) -> list[str]:
    """Draw a result of ``measure_modular_qa`` into PNG files; returns their names. Raises ParameterError."""
    found = points(result)
    figures = {"ttft.png": _against(found, _milliseconds, "time to first token (ms)")}
    if any(point.recomputed is not None for point in found):
        figures["recomputed.png"] = _against(found, _percent, "module tokens computed anew (%)")
        figures["tasks.png"] = _tasks(result)
    if len({point.documents for point in found}) > 1:
        figures["documents.png"] = _documents(found)
    if "repeated" in result:
        figures["repeated.png"] = _repeated(result["repeated"])
    for name, figure in figures.items():
        save(figure, directory / name, option="--report")
    return list(figures)


def _milliseconds(point: Point) -> float | None:
    return 1000 * point.ttft_s


def _percent(point: Point) -> float | None:
    return None if point.recomputed is None else 100 * point.recomputed


def _against(found: Sequence[Point], x: _X, name: str) -> Figure:
    """A column for each number of documents: exact match above, divergence below. A line for each family."""
    counts = list(dict.fromkeys(point.documents for point in found))
    figure, panels = _figure(2, len(counts))
    styles = _styles([point.family for point in found])
    for column, documents in enumerate(counts):
        here = [point for point in found if point.documents == documents]
        above, below = panels[0][column], panels[1][column]
        for family, line in _lines(here, x).items():
            _line(above, line, x, _match, styles[family], _match_bounds)
            _line(below, line, x, lambda point: point.kl, styles[family])
        _reference(above, here[0])
        _divergences(below)
        above.set_title(f"{documents} documents, {here[0].questions:,} questions")
        _matches(above)
        below.set_xlabel(name)
        if x is _milliseconds:
            for axes in (above, below):
                _logarithmic(axes)
        else:
            for axes in (above, below):
                _shares(axes)
    add_legend(figure, 3, "outside upper center")
    return figure


def _tasks(result: dict[str, Any]) -> Figure:
    """A row of panels for each task, a column for each number of documents: exact match over the recomputed share."""
    counts = list(dict.fromkeys(row["documents"] for row in result["rows"]))
    figure, panels = _figure(len(result["tasks"]), len(counts))
    styles = _styles([point.family for point in points(result)])
    for row, task in enumerate(result["tasks"]):
        for column, documents in enumerate(counts):
            axes = panels[row][column]
            here = [point for point in points(result, [task]) if point.documents == documents]
            for family, line in _lines(here, _percent).items():
                _line(axes, line, _percent, _match, styles[family], _match_bounds)
            _reference(axes, here[0])
            _shares(axes)
            counted = "" if task in counting(result, documents) else " (does not count)"
            axes.set_title(f"{task}, {documents} documents{counted}")
            _matches(axes)
    for axes in panels[-1]:
        axes.set_xlabel("module tokens computed anew (%)")
    add_legend(figure, 3, "outside upper center")
    return figure


def _documents(found: Sequence[Point]) -> Figure:
    """Exact match and divergence over the number of documents. A line for each mode."""
    figure, panels = _figure(1, 2)
    styles = _styles([point.label for point in found])
    for label, style in styles.items():
        line = sorted((point for point in found if point.label == label), key=_count)
        _line(panels[0][0], line, _count, _match, style | {"label": label}, _match_bounds)
        _line(panels[0][1], line, _count, lambda point: point.kl, style | {"label": label})
    for axes, name in zip(panels[0], ("exact match", "KL (nats a token)"), strict=True):
        axes.set_xticks(sorted({point.documents for point in found}))
        axes.set_xlabel("documents")
        axes.set_ylabel(name)
    _matches(panels[0][0])
    _divergences(panels[0][1])
    add_legend(figure, 3, "outside upper center")
    return figure


def _repeated(rows: Sequence[dict[str, Any]]) -> Figure:
    """Exact match and divergence over the repetitions of the questions. A line for each number of documents."""
    figure, panels = _figure(1, 2)
    counts = list(dict.fromkeys(row["documents"] for row in rows))
    for documents, style in zip(counts, _styles([f"{count} documents" for count in counts]).values(), strict=True):
        line = [row for row in rows if row["documents"] == documents]
        times = [row["repetition"] for row in line]
        for axes, name in zip(panels[0], ("exact_match", "kl"), strict=True):
            axes.plot(times, [row[name] for row in line], markersize=4, linewidth=1.2, **style)
        panels[0][0].axhline(line[0]["reference"], color=style["color"], linestyle="--", linewidth=0.8)
    for axes, name in zip(panels[0], ("exact match (dashed: full prefill)", "KL (nats a token)"), strict=True):
        axes.set_xticks(sorted({row["repetition"] for row in rows}))
        axes.set_xlabel("times that each question was asked")
        axes.set_ylabel(name)
    bottom, top = panels[0][0].get_ylim()
    panels[0][0].set_ylim(max(bottom, -_MARGIN), min(top, 1 + _MARGIN))
    panels[0][1].set_yscale("symlog", linthresh=_EXACT_KL)
    panels[0][1].set_ylim(bottom=-_EXACT_KL / 4)
    add_legend(figure, 3, "outside upper center")
    return figure


def _count(point: Point) -> float:
    return point.documents


def _match(point: Point) -> float:
    return point.exact_match


def _match_bounds(point: Point) -> tuple[float, float]:
    """The distances of the paired difference from its lower and upper bound, within 0 and 1."""
    difference, low, high = point.difference
    below, above = max(difference - low, 0.0), max(high - difference, 0.0)
    return min(below, point.exact_match), min(above, 1 - point.exact_match)


def _lines(found: Sequence[Point], x: _X) -> dict[str, list[Point]]:
    """The points of every family, by recomputed share. A family like ``modular+…`` starts at the point of
    ``modular``.
    """
    placed = [point for point in found if x(point) is not None]
    lines: dict[str, list[Point]] = {}
    for point in placed:
        lines.setdefault(point.family, []).append(point)
    for family, line in lines.items():
        bare, plus, added = family.partition("+")
        ending = "".join(added.partition(",")[1:])
        if plus and bare + ending in lines:
            line += lines[bare + ending]
        line.sort(key=lambda point: point.recomputed or 0.0)
    return lines


def _line(
    axes: Axes,
    line: Sequence[Point],
    x: _X,
    y: Callable[[Point], float],
    style: _Style,
    bounds: Callable[[Point], tuple[float, float]] | None = None,
) -> None:
    xs, ys = [x(point) for point in line], [y(point) for point in line]
    errors: Any = None if bounds is None else tuple(zip(*map(bounds, line), strict=True))
    size = 4 if len(line) > 1 else 7  # a larger start point shows behind the lines
    axes.errorbar(xs, ys, yerr=errors, markersize=size, linewidth=1.2, elinewidth=0.6, capsize=2, **style)  # type: ignore[arg-type]


def _reference(axes: Axes, point: Point) -> None:
    """Lines of full prefill's exact match and of the noticeable difference below it."""
    axes.axhline(point.reference, color="0.3", linestyle="--", linewidth=0.8, label="full prefill")
    name = f"full prefill, {NOTICED:+.2f}".replace("-", "−")
    axes.axhline(point.reference + NOTICED, color="0.6", linestyle=":", linewidth=0.8, label=name)


def _matches(axes: Axes) -> None:
    """No further than a share goes."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, -_MARGIN), min(top, 1 + _MARGIN))
    axes.set_ylabel("exact match")


def _shares(axes: Axes) -> None:
    """Show from zero to at least five percent, since possibly nothing is recomputed."""
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, -0.25), max(right, 5.0))


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _divergences(axes: Axes) -> None:
    axes.set_yscale("symlog", linthresh=_SMALLEST_KL)
    axes.set_ylim(-_SMALLEST_KL / 4, 2 * max(_SMALLEST_KL, axes.get_ylim()[1]))
    axes.set_ylabel("KL (nats a token)")


def _styles(names: Sequence[str]) -> dict[str, _Style]:
    """A style for each name. The first 64 pairs of colour and marker are distinct."""
    styles: dict[str, _Style] = {}
    for name in dict.fromkeys(names):
        number = len(styles)
        marker = _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)]
        styles[name] = {"color": _COLOURS[number % len(_COLOURS)], "marker": marker, "label": name}
    return styles


def _figure(rows: int, columns: int) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 4.2 * columns), 0.8 + 2.5 * rows))
    return figure, figure.subplots(rows, columns, squeeze=False)
